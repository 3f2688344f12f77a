/* Functions that call the generated gradient: leapfrog steps and microcanonical steps of many chains, NUTS's subtrees.

   Each chain is computed by one thread, so that results do not depend on the number of threads. They are POSIX threads
   that end with the call: OpenMP's threads wait for each other by spinning, which on a busy machine costs several times
   as much as the work itself. */
#include <pthread.h>
typedef struct {
  double *z, *r, *density, *g;
  const double *m, *step;
  long steps, chains, size, next;
  /* For microcanonical steps. shares: of turns and drifts; noise (or null) and spread: refresh u before each step. */
  double *u, *error;
  const double *shares, *counts, *noise, *spread;
  long stages;
} Job;
/* Between FLUSH and RESTORE denormal numbers are zero in this thread: arithmetic with them is slow, and the derivative
   of gelu has many. Their logarithm is -INFINITY. */
#if defined(__SSE__)
#define FLUSH unsigned mode = __builtin_ia32_stmxcsr(); __builtin_ia32_ldmxcsr(mode | 0x8040);
#define RESTORE __builtin_ia32_ldmxcsr(mode);
#else
#define FLUSH
#define RESTORE
#endif
static double dot(const double *a, const double *b, long n) {
  double sum = 0;
  for (long i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}
/* A turn of u in a constant gradient; returns K' - K. See the function of the same name in microcanonical.py. */
static double turn(double *u, const double *g, double time, long n) {
  double norm = sqrt(dot(g, g, n)), along = norm > 1e-300 ? dot(g, u, n) / norm : 0;
  double delta = time * norm / (n - 1), decay = exp(-delta);
  double a = norm > 1e-300 ? (1 - decay) * (1 + decay + along * (1 - decay)) / norm : norm, b = 2 * decay;
  for (long i = 0; i < n; i++) u[i] = a * g[i] + b * u[i];
  double scale = 1 / sqrt(dot(u, u, n));
  for (long i = 0; i < n; i++) u[i] *= scale;
  return (n - 1) * (delta - 0.69314718055994531 + log1p(along + (1 - along) * decay * decay));
}
/* Steps of the isokinetic integrator, until the error is not finite. error: with noise of each step, else the sum */
static void isokinetic(Job *job, long c, char *work) {
  long size = job->size, count = job->counts[c];
  double *z = job->z + c * size, *u = job->u + c * size, *g = job->g + c * size, e = job->step[c], all = 0;
  const double *m = job->m + c * size; /* the scale of its coordinates */
  for (long s = 0; s < count; s++) {
    double before = job->density[c], lost = 0;
    if (job->noise) {
      const double *noise = job->noise + (c * count + s) * size;
      for (long i = 0; i < size; i++) u[i] += job->spread[c] * noise[i];
      double scale = 1 / sqrt(dot(u, u, size));
      for (long i = 0; i < size; i++) u[i] *= scale;
    }
    lost += turn(u, g, e * job->shares[0], size);
    for (long k = 1; k < job->stages; k += 2) {
      for (long i = 0; i < size; i++) z[i] += e * job->shares[k] * m[i] * u[i];
      job->density[c] = gradient(z, g, work);
      for (long i = 0; i < size; i++) g[i] *= m[i];
      lost += turn(u, g, e * job->shares[k + 1], size);
    }
    lost -= job->density[c] - before;
    all += lost;
    if (job->noise) job->error[c * count + s] = lost;
    if (!__builtin_isfinite(lost)) break;
  }
  if (!job->noise) job->error[c] = all;
}
/* Leapfrog steps (r += e/2 g; z += e m r; r += e/2 g), until the density is not finite; without r, the gradient alone */
static void chain(Job *job, long c, char *work) {
  long size = job->size;
  double *z = job->z + c * size, *g = job->g + c * size;
  if (job->u) { isokinetic(job, c, work); return; }
  if (!job->r) { job->density[c] = gradient(z, g, work); return; }
  double *r = job->r + c * size, e = job->step[c];
  for (long s = 0; s < job->steps; s++) {
    for (long i = 0; i < size; i++) { r[i] += 0.5 * e * g[i]; z[i] += e * job->m[i] * r[i]; }
    double density = job->density[c] = gradient(z, g, work);
    for (long i = 0; i < size; i++) r[i] += 0.5 * e * g[i];
    if (!__builtin_isfinite(density)) break;
  }
}
static void *chains(void *given) {
  Job *job = given;
  char *work = aligned_alloc(64, WORK);
  FLUSH
  for (long c; (c = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->chains;) chain(job, c, work);
  RESTORE
  free(work);
  return 0;
}
static void run(Job *job, long threads) {
  pthread_t others[63];
  int n = 0;
  while (n < 63 && n + 1 < threads && n + 1 < job->chains && !pthread_create(others + n, 0, chains, job)) n++;
  chains(job);
  while (n) pthread_join(others[--n], 0);
}
void leapfrog(double *z, double *r, double *density, double *g, const double *m, const double *step, long steps,
              long chains, long size, long threads) {
  Job job = {z, r, density, g, m, step, steps, chains, size, 0};
  run(&job, threads);
}
void microcanonical(double *z, double *u, double *density, double *g, const double *m, double *error,
                    const double *step, const double *counts, const double *shares, const double *noise,
                    const double *spread, long stages, long chains, long size, long threads) {
  Job job = {z, 0, density, g, m, step, 0, chains, size, 0, u, error, shares, counts, noise, spread, stages};
  run(&job, threads);
}
/* A subtree of NUTS in one direction. See Dynamics.subtree in trajectories.py. */
typedef struct { double *first, *momentum, *z, *g, density, weight, acceptance, steps; int turning, diverging; } Node;
typedef struct {
  double *z, *u, *g, *levels;
  const double *scale, *uniform;
  double step, energy;
  long size;
  char *work;
} Tree;
static int turns(const double *first, const double *last, const double *momentum, long n) {
  double a = 0, b = 0;
  for (long i = 0; i < n; i++) {
    double between = momentum[i] - 0.5 * (first[i] + last[i]);
    a += first[i] * between;
    b += last[i] * between;
  }
  return a <= 0 || b <= 0;
}
static void build(Tree *t, long depth, Node *out) {
  long n = t->size;
  if (!depth) {
    for (long i = 0; i < n; i++) {
      double e = t->step * t->scale[i];
      t->u[i] += 0.5 * e * t->g[i];
      t->z[i] += e * t->u[i];
    }
    out->density = gradient(t->z, t->g, t->work);
    for (long i = 0; i < n; i++) {
      t->u[i] += 0.5 * t->step * t->scale[i] * t->g[i];
      out->first[i] = out->momentum[i] = t->u[i];
      out->z[i] = t->z[i];
      out->g[i] = t->g[i];
    }
    double error = 0.5 * dot(t->u, t->u, n) - out->density - t->energy;
    if (!__builtin_isfinite(error)) error = INFINITY;
    out->weight = -error;
    out->acceptance = error <= 0 ? 1 : exp(-error);
    out->steps = 1;
    out->turning = 0;
    out->diverging = error > 1000;
    return;
  }
  build(t, depth - 1, out);
  if (out->turning || out->diverging) return;
  double *level = t->levels + 4 * n * (depth - 1);
  Node two = {level, level + n, level + 2 * n, level + 3 * n};
  build(t, depth - 1, &two);
  double high = out->weight > two.weight ? out->weight : two.weight;
  double low = out->weight > two.weight ? two.weight : out->weight, weight = high + log1p(exp(low - high));
  if (*t->uniform++ < exp(two.weight - weight)) {
    for (long i = 0; i < n; i++) { out->z[i] = two.z[i]; out->g[i] = two.g[i]; }
    out->density = two.density;
  }
  for (long i = 0; i < n; i++) out->momentum[i] += two.momentum[i];
  out->weight = weight;
  out->acceptance += two.acceptance;
  out->steps += two.steps;
  out->turning = two.turning || turns(out->first, t->u, out->momentum, n);
  out->diverging = two.diverging;
}
/* end: z, u, g at its start, replaced by those at its end. found: summed momentum, then z and g of the proposal.
   numbers: density, weight, acceptance, steps, turning, diverging. */
void subtree(double *end, double *found, double *numbers, const double *scale, const double *uniform, double step,
             double energy, long depth, long size) {
  double *levels = aligned_alloc(64, ((4 * depth + 1) * size * sizeof(double) + 63) / 64 * 64);
  char *work = aligned_alloc(64, WORK);
  Tree t = {end, end + size, end + 2 * size, levels + size, scale, uniform, step, energy, size, work};
  Node node = {levels, found, found + size, found + 2 * size};
  FLUSH
  build(&t, depth, &node);
  RESTORE
  double all[] = {node.density, node.weight, node.acceptance, node.steps, node.turning, node.diverging};
  for (int i = 0; i < 6; i++) numbers[i] = all[i];
  free(work);
  free(levels);
}
