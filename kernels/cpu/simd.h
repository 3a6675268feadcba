// Vectors of floats, one width an instruction set, over the compiler's own vector types.
//
// Every kernel source is compiled once an instruction set, with LILY_ISA (a namespace) and LILY_WIDTH (floats a
// vector) set by the build. A width wider than the machine's registers still compiles to correct code, which is how
// the 16-lane kernels are tested on processors without AVX-512.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace lily::LILY_ISA {

constexpr int kWidth = LILY_WIDTH;

typedef float VF __attribute__((vector_size(LILY_WIDTH * 4)));
typedef int32_t VI __attribute__((vector_size(LILY_WIDTH * 4)));
typedef uint32_t VU __attribute__((vector_size(LILY_WIDTH * 4)));
typedef uint16_t VH __attribute__((vector_size(LILY_WIDTH * 2)));

#define LILY_INLINE static inline __attribute__((always_inline))

LILY_INLINE VF splat(float x) { return VF{} + x; }
LILY_INLINE VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LILY_INLINE VU load_words(const void* p) {
  VU v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LILY_INLINE void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }

LILY_INLINE VF bits_to_float(VU v) {
  VF out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// a·b + c with one rounding where the instruction set has it.
LILY_INLINE VF fma(VF a, VF b, VF c) {
#if LILY_WIDTH == 16 && defined(__AVX512F__)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LILY_WIDTH == 8 && defined(__FMA__)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LILY_WIDTH == 4 && defined(__ARM_NEON)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

LILY_INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }
LILY_INLINE VF max(VF a, VF b) { return a > b ? a : b; }
LILY_INLINE VF min(VF a, VF b) { return a < b ? a : b; }

// Sum of the lanes, pairwise, in an order that depends on the width alone.
LILY_INLINE float hsum(VF v) {
  float lane[kWidth];
  std::memcpy(lane, &v, sizeof v);
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}
LILY_INLINE float hmax(VF v) {
  float best = v[0];
  for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// Storage types: bfloat16 is the upper half of a float.
LILY_INLINE float from_bf16(uint16_t h) {
  const uint32_t word = uint32_t{h} << 16;
  float out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}
LILY_INLINE uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
LILY_INLINE VF load_bf16(const uint16_t* p) {
  VH half;
  std::memcpy(&half, p, sizeof half);
  return bits_to_float(__builtin_convertvector(half, VU) << 16);
}

// e^x to about 2 units in the last place; 0 below -87.3, +inf above 88.7.
LILY_INLINE VF exp(VF x) {
  const VF clamped = min(max(x, splat(-87.33654f)), splat(88.72283f));
  const VF scaled = clamped * 1.44269504f;
  const VI whole = __builtin_convertvector(scaled + (scaled < 0.0f ? splat(-0.5f) : splat(0.5f)), VI);
  const VF n = to_float(whole);
  const VF r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  VF p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  // 2^n in two factors: n = 128 alone would overflow the exponent field.
  const VI half = whole >> 1;
  const VF first = bits_to_float((VU)((half + 127) << 23));
  const VF second = bits_to_float((VU)((whole - half + 127) << 23));
  const VF value = p * first * second;
  return x < -87.33654f ? VF{} : (x > 88.72283f ? splat(INFINITY) : value);
}
LILY_INLINE VF sigmoid(VF x) { return 1.0f / (1.0f + exp(-x)); }
LILY_INLINE VF silu(VF x) { return x * sigmoid(x); }

// Scalar twins, for tails and single values.
LILY_INLINE float sigmoid1(float x) { return 1.0f / (1.0f + std::exp(-x)); }
LILY_INLINE float silu1(float x) { return x * sigmoid1(x); }

// f(pointer to kWidth floats at i, ...) is for callers; these walk n floats with a scalar tail.
LILY_INLINE float dot(const float* a, const float* b, int64_t n) {
  VF s0{}, s1{};
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    s0 = fma(load(a + i), load(b + i), s0);
    s1 = fma(load(a + i + kWidth), load(b + i + kWidth), s1);
  }
  for (; i + kWidth <= n; i += kWidth) s0 = fma(load(a + i), load(b + i), s0);
  float sum = hsum(s0 + s1);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace lily::LILY_ISA
