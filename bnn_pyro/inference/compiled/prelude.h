/* Mathematical functions for the generated code, in two precisions. */
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
double sqrt(double); float sqrtf(float); double fabs(double); float fabsf(float); double pow(double, double);
float powf(float, float); double floor(double); float floorf(float); double ceil(double); float ceilf(float);
double rint(double); float rintf(float); double atan2(double, double); float atan2f(float, float);
void *aligned_alloc(unsigned long, unsigned long); void free(void *);
__attribute__((const)) double lgamma(double); /* "const" avoids repeated calls; nothing uses their signgam */
__attribute__((const)) float lgammaf(float);
static inline double quick_erf(double);
static inline float quick_erff(float);
#define INLINE(type, f) \
  static inline type larger##f(type a, type b) { return a > b || a != a ? a : b; } \
  static inline type smaller##f(type a, type b) { return a < b || a != a ? a : b; } \
  static inline type choose##f(int c, type a, type b) { return c ? a : b; } \
  static inline type square##f(type a) { return a * a; } \
  static inline type sign##f(type a) { return (a > 0) - (a < 0); } \
  static inline type digamma##f(type a) { /* for a > 0, by its recurrence and the asymptotic series */ \
    type s = 0; \
    for (; a < 10; a++) s -= 1 / a; \
    type r = 1 / (a * a); \
    return s + log##f(a) - 1 / (2 * a) - r * ((type)1 / 12 - r * ((type)1 / 120 - r * ((type)1 / 252 - r / 240))); \
  }
INLINE(double, ) INLINE(float, f)
static inline double quick_tanh(double x) { return tanh(x); }
static inline double quick_erf(double x) { return erf(x); }
/* The rational approximations of Eigen (generic_fast_tanh_float, generic_fast_erf_float), accurate to a few units in the
   last place; erf is cut to [-1, 1], so that 1 + erf is not negative. */
static inline float quick_tanhf(float x) {
  float c = smallerf(largerf(x, -7.9053111f), 7.9053111f), s = c * c;
  float p = -2.76076847742355e-16f * s + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f; p = p * s + 5.12229709037114e-08f; p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f; p = p * s + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f * s + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f; q = q * s + 4.89352518554385e-03f;
  float t = c * p / q;
  return s < 1.6e-7f ? x : t;
}
static inline float quick_erff(float x) {
  float c = smallerf(largerf(x, -4), 4), s = c * c;
  float p = -2.72614225801306e-10f * s + 2.77068142495902e-08f; p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f; p = p * s + -7.34990630326855e-04f; p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  float q = -1.45660718464996e-05f * s + -2.13374055278905e-04f; q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f; q = q * s + -1.42647390514189e-02f;
  float y = c * p / q;
  y = y > 1 ? 1 : y;  /* gcc does not vectorise smallerf here */
  return y < -1 ? -1 : y;
}
/* out[m, n] = sum over k of x[m, k] y[k, n]. Sums of several elements are in registers, so that each loaded number is
   used several times. strip## loops along n, contiguous in out and y, by one or two vectors (parts). The last vector may
   overlap the one before, and then computes the same numbers again. dots## loops along k, contiguous in x and y; of its
   last vector, which overlaps likewise, only new numbers count: the others are multiplied by 0 (infinity becomes nan). */
#define ALWAYS static inline __attribute__((always_inline)) void
#define MATMUL(type, f) \
  typedef type lanes##f __attribute__((vector_size(32), aligned(__alignof__(type)), may_alias)); \
  static const type last##f[64 / sizeof(type)] = {[32 / sizeof(type) ... 64 / sizeof(type) - 1] = 1}; \
  ALWAYS strip##f(type *restrict out, const type *restrict x, const type *restrict y, int rows, int parts, long N, \
                  long K, long om, long xm, long xk, long yk) { \
    long W = 32 / sizeof(type); \
    for (long n = 0; n < N; n += parts * W) { \
      long at = n + parts * W > N ? N - parts * W : n; \
      lanes##f a[4][2] = {{{0}}}, b[2]; \
      for (long k = 0; k < K; k++) { \
        for (int c = 0; c < parts; c++) b[c] = *(const lanes##f *)(y + k * yk + at + c * W); \
        for (int r = 0; r < rows; r++) \
          for (int c = 0; c < parts; c++) a[r][c] += b[c] * x[r * xm + k * xk]; \
      } \
      for (int r = 0; r < rows; r++) \
        for (int c = 0; c < parts; c++) *(lanes##f *)(out + r * om + at + c * W) = a[r][c]; \
    } \
  } \
  ALWAYS strips##f(type *restrict out, const type *restrict x, const type *restrict y, int parts, long M, long N, \
                   long K, long om, long xm, long xk, long yk) { \
    long m = 0; \
    for (; m + 4 <= M; m += 4) strip##f(out + m * om, x + m * xm, y, 4, parts, N, K, om, xm, xk, yk); \
    for (; m < M; m++) strip##f(out + m * om, x + m * xm, y, 1, parts, N, K, om, xm, xk, yk); \
  } \
  ALWAYS dots##f(type *restrict out, const type *restrict x, const type *restrict y, int rows, int columns, long K, \
                 long om, long on, long xm, long yn) { \
    long k = 0, W = 32 / sizeof(type); \
    lanes##f a[4][2] = {{{0}}}; \
    for (; k + W <= K; k += W) \
      for (int r = 0; r < rows; r++) \
        for (int c = 0; c < columns; c++) \
          a[r][c] += *(const lanes##f *)(x + r * xm + k) * *(const lanes##f *)(y + c * yn + k); \
    if (0 < k && k < K) { \
      lanes##f new = *(const lanes##f *)(last##f + K - k); \
      for (int r = 0; r < rows; r++) \
        for (int c = 0; c < columns; c++) \
          a[r][c] += *(const lanes##f *)(x + r * xm + K - W) * new * *(const lanes##f *)(y + c * yn + K - W); \
      k = K; \
    } \
    for (int r = 0; r < rows; r++) \
      for (int c = 0; c < columns; c++) { \
        type sum = 0; \
        for (int i = 0; i < W; i++) sum += a[r][c][i]; \
        for (long j = k; j < K; j++) sum += x[r * xm + j] * y[c * yn + j]; \
        out[r * om + c * on] = sum; \
      } \
  } \
  ALWAYS matmul##f(type *restrict out, const type *restrict x, const type *restrict y, long M, long N, long K, long om, \
                   long on, long xm, long xk, long yk, long yn) { \
    long m = 0, W = 32 / sizeof(type); \
    if (on == 1 && yn == 1 && N >= 2 * W) strips##f(out, x, y, 2, M, N, K, om, xm, xk, yk); \
    else if (on == 1 && yn == 1 && N >= W) strips##f(out, x, y, 1, M, N, K, om, xm, xk, yk); \
    else if (om == 1 && xm == 1 && M >= 2 * W) strips##f(out, y, x, 2, N, M, K, on, yn, yk, xk); \
    else if (om == 1 && xm == 1 && M >= W) strips##f(out, y, x, 1, N, M, K, on, yn, yk, xk); \
    else if (xk == 1 && yk == 1) { \
      for (; m < M; m += 4) { \
        int rows = M - m < 4 ? 1 : 4; \
        for (long n = 0; n < N; n += 2) { \
          int columns = N - n < 2 ? 1 : 2; \
          type *o = out + m * om + n * on; \
          const type *p = x + m * xm, *q = y + n * yn; \
          if (rows == 4 && columns == 2) dots##f(o, p, q, 4, 2, K, om, on, xm, yn); \
          else if (rows == 4) dots##f(o, p, q, 4, 1, K, om, on, xm, yn); \
          else for (long r = m; r < M; r++) for (long c = n; c < n + columns; c++) \
            dots##f(out + r * om + c * on, x + r * xm, y + c * yn, 1, 1, K, om, on, xm, yn); \
        } \
      } \
    } else \
      for (; m < M; m++) \
        for (long n = 0; n < N; n++) { \
          type a = 0; \
          for (long k = 0; k < K; k++) a += x[m * xm + k * xk] * y[k * yk + n * yn]; \
          out[m * om + n * on] = a; \
        } \
  }
MATMUL(double, ) MATMUL(float, f)
