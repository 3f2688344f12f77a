/* The forward and backward pass of DrawNormals in gradients.py. Each call processes every step-th piece of the table
   that _pieces makes, beginning at first. Without vector instructions PyTorch's operators are faster. */
#ifndef VECTORS
#error "no vector instructions for exp and log"
#endif
#include <stdint.h>
float sqrtf(float);
#define LANES 64
/* Pseudo-random numbers from consecutive keys: splitmix64 (Steele, Lea & Flood 2014) */
static uint64_t mixed(uint64_t *key) {
  uint64_t z = *key += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
/* 32 random bits per lane, each lane with its own xoshiro128++ generator (Blackman & Vigna 2021, arXiv:1805.01407) */
static void bits(uint32_t state[4][LANES], uint32_t *restrict out) {
  for (int i = 0; i < LANES; i++) {
    uint32_t a = state[0][i], b = state[1][i], c = state[2][i] ^ a, d = state[3][i], sum = a + d;
    out[i] = (sum << 7 | sum >> 25) + a;
    d ^= b;
    state[0][i] = a ^ d;
    state[1][i] = b ^ c;
    state[2][i] = c ^ b << 9;
    state[3][i] = d << 11 | d >> 21;
  }
}
/* 2 * LANES independent draws of Normal(0, 1) by Box & Muller 1958. The angle is drawn as one of at most 45 degrees and
   an octant; sine and cosine are the polynomials of Cephes (sinf.c, Moshier 1992) */
static void normals(uint32_t state[4][LANES], float *restrict out) {
  uint32_t one[LANES], two[LANES];
  bits(state, one);
  bits(state, two);
  for (int i = 0; i < LANES; i++) {
    float radius = sqrtf(-2 * logf(((one[i] >> 8) + 1) * 0x1p-24f));
    float x = (int32_t)(two[i] << 2) * (0.785398163f * 0x1p-31f), q = x * x;
    float sine = x + x * q * (-0.166666546f + q * (0.00833216087f - q * 0.000195152959f));
    float cosine = 1 - 0.5f * q + q * q * (0.0416666457f - q * (0.00138873162f - q * 0.0000244331571f));
    radius = two[i] >> 31 ? radius : -radius;
    out[i] = radius * (two[i] >> 30 & 1 ? sine : cosine);
    out[LANES + i] = radius * (two[i] >> 30 & 1 ? cosine : sine);
  }
}
/* Scales, draws and sums of n numbers. narrow: all rho are below -3, where series in t = exp(rho) replace logarithms */
static inline __attribute__((always_inline)) void numbers(
    const float *restrict loc, const float *restrict rho, float *restrict scale, float *restrict noise,
    float *restrict draw, const float *restrict normal, double *restrict sums, long n, int narrow) {
  float logs = 0, squares = 0;
  for (long i = 0; i < n; i++) {
    float r = rho[i], t = expf(r), s;
    if (narrow) {
      s = t * (1 - t * (0.5f - t * (0.333333333f - t * (0.25f - t * 0.2f))));
      logs += r - t * (0.5f - t * (0.208333333f - t * (0.125f - t * (0.0871527778f - t * 0.0659722222f))));
    } else {
      s = r > 20 ? r : log1pf(t);
      logs += logf(s);
    }
    scale[i] = s;
    noise[i] = normal[i];
    draw[i] = loc[i] + s * normal[i];
    squares += loc[i] * loc[i] + s * s;
  }
  sums[0] += logs;
  sums[1] += squares;
}
static void draw_piece(const float *restrict loc, const float *restrict rho, float *restrict scale,
                       float *restrict noise, float *restrict draw, double *restrict sums, uint64_t key, long n) {
  uint32_t state[4][LANES];
  float normal[2 * LANES];
  for (int i = 0; i < LANES; i++)
    for (int k = 0; k < 4; k += 2) {
      uint64_t z = mixed(&key);
      state[k][i] = z;
      state[k + 1][i] = z >> 32;
    }
  sums[0] = sums[1] = 0;
  for (long i = 0; i < n; i += 2 * LANES) {
    long m = n - i < 2 * LANES ? n - i : 2 * LANES, narrow = 1;
    for (long k = i; k < i + m; k++) narrow &= rho[k] < -3;
    normals(state, normal);
    if (narrow) numbers(loc + i, rho + i, scale + i, noise + i, draw + i, normal, sums, m, 1);
    else numbers(loc + i, rho + i, scale + i, noise + i, draw + i, normal, sums, m, 0);
  }
}
/* scale = softplus(rho), noise of Normal(0, 1) determined by key, draw = loc + scale noise, and two sums per piece */
void draw(const float *loc, const float *rho, float *scale, float *noise, float **draws, const long (*table)[4],
          long first, long step, long pieces, double *sums, uint64_t key) {
  for (long i = first; i < pieces; i += step) {
    long at = table[i][1];
    draw_piece(loc + at, rho + at, scale + at, noise + at, draws[table[i][0]] + table[i][2], sums + 2 * i, key + i,
               table[i][3]);
  }
}
static void differentiate_piece(const float *restrict loc, const float *restrict rho, float *restrict scale,
                                float *restrict noise, const float *restrict gradient, float a, float b, long n) {
  for (long i = 0; i < n; i++) {
    float g = gradient[i], s = scale[i], slope = g * noise[i] + a / s + 2 * b * s;
    noise[i] = g + 2 * b * loc[i];
    scale[i] = slope / (1 + expf(-rho[i]));
  }
}
/* Overwrite noise with the gradient of loc, and scale with that of rho; a, b: one number per array */
void differentiate(const float *loc, const float *rho, float *scale, float *noise, float **gradients,
                   const long (*table)[4], long first, long step, long pieces, const float *a, const float *b) {
  for (long i = first; i < pieces; i += step) {
    long k = table[i][0], at = table[i][1];
    differentiate_piece(loc + at, rho + at, scale + at, noise + at, gradients[k] + table[i][2], a[k], b[k], table[i][3]);
  }
}
