/* Mathematics of which gcc makes vector instructions, where the C library has them: then VECTORS is defined. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <features.h>
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define VECTOR __attribute__((simd("notinbranch"), const))
#define VECTORS 1
#endif
#endif
#ifndef VECTOR
#define VECTOR
#endif
#define BOTH(name) VECTOR double name(double); VECTOR float name##f(float);
BOTH(exp) BOTH(expm1) BOTH(log) BOTH(log1p) BOTH(tanh) BOTH(erf) BOTH(sin) BOTH(cos)
BOTH(tan) BOTH(asin) BOTH(acos) BOTH(atan) BOTH(sinh) BOTH(cosh) BOTH(asinh)
