/* A piece of DrawNormals (gradients.py), n numbers. Without vector instructions PyTorch's operators are quicker. */
#ifndef VECTORS
#error "no vector instructions for exp and log"
#endif
#include <stdint.h>
float sqrtf(float);
#define LANES 64
/* Numbers that look random, of key = 0, 1, 2, ...: splitmix64 (Steele, Lea & Flood 2014) */
static uint64_t mixed(uint64_t *key) {
  uint64_t z = *key += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
/* 32 random bits for each lane: xoshiro128++ (Blackman & Vigna 2021, arXiv:1805.01407), a generator a lane */
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
/* scale = softplus(rho), noise of Normal(0, 1) by the key alone, draw = loc + scale noise, and the two sums */
void draw(const float *restrict loc, const float *restrict rho, float *restrict scale, float *restrict noise,
          float *restrict draw, double *restrict sums, uint64_t key, long n) {
  uint32_t state[4][LANES], one[LANES], two[LANES];
  float normal[2 * LANES];
  for (int i = 0; i < LANES; i++)
    for (int k = 0; k < 4; k += 2) {
      uint64_t z = mixed(&key);
      state[k][i] = z;
      state[k + 1][i] = z >> 32;
    }
  sums[0] = sums[1] = 0;
  for (long first = 0; first < n; first += 2 * LANES) {
    bits(state, one);
    bits(state, two);
    for (int i = 0; i < LANES; i++) { /* Box & Muller 1958; two cosines, as gcc makes no vectors of a sine beside one */
      float radius = sqrtf(-2 * logf(((one[i] >> 8) + 1) * 0x1p-24f)), angle = (int32_t)two[i] * 1.46291808e-9f;
      normal[i] = radius * cosf(angle);
      normal[LANES + i] = radius * cosf(angle - 1.57079633f);
    }
    long end = n - first < 2 * LANES ? n - first : 2 * LANES;
    float logs = 0, squares = 0;
    for (long i = 0; i < end; i++) {
      float m = loc[first + i], r = rho[first + i], s = r > 20 ? r : log1pf(expf(r));
      scale[first + i] = s;
      noise[first + i] = normal[i];
      draw[first + i] = m + s * normal[i];
      logs += logf(s);
      squares += m * m + s * s;
    }
    sums[0] += logs;
    sums[1] += squares;
  }
}
/* The gradients of loc, in the place of noise, and of rho, in that of scale */
void differentiate(const float *restrict loc, const float *restrict rho, float *restrict scale, float *restrict noise,
                   const float *restrict gradient, float a, float b, long n) {
  for (long i = 0; i < n; i++) {
    float g = gradient[i], s = scale[i], slope = g * noise[i] + a / s + 2 * b * s;
    noise[i] = g + 2 * b * loc[i];
    scale[i] = slope / (1 + expf(-rho[i]));
  }
}
