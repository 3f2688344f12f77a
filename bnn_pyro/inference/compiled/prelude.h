/* What the generated code is made of: mathematics in two precisions. */
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <features.h>
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define VECTOR __attribute__((simd("notinbranch"), const))
#endif
#endif
#ifndef VECTOR
#define VECTOR
#endif
#define BOTH(name) VECTOR double name(double); VECTOR float name##f(float);
BOTH(exp) BOTH(expm1) BOTH(log) BOTH(log1p) BOTH(tanh) BOTH(erf) BOTH(sin) BOTH(cos)
double sqrt(double); float sqrtf(float); double fabs(double); float fabsf(float); double pow(double, double);
float powf(float, float); void *aligned_alloc(unsigned long, unsigned long); void free(void *);
#define INLINE(type, f) \
  static inline type larger##f(type a, type b) { return a > b || a != a ? a : b; } \
  static inline type smaller##f(type a, type b) { return a < b || a != a ? a : b; } \
  static inline type leaky##f(type a, type slope) { return a > 0 ? a : a * slope; } \
  static inline type choose##f(int c, type a, type b) { return c ? a : b; } \
  static inline type square##f(type a) { return a * a; } \
  static inline type gelu##f(type a) { return a * (type)0.5 * (1 + erf##f(a * (type)0.70710678118654752)); }
INLINE(double, ) INLINE(float, f)
static inline double quick_tanh(double x) { return tanh(x); }
/* The rational approximation of Eigen (generic_fast_tanh_float), good to a few units in the last place */
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
