// Sums over the lanes of many vectors at once, de-interleaving, and vectors that are only partly there.
#pragma once

#include "lanes.h"

namespace lily::LILY_ISA {

// Lane i of the result is lane I[i] of a followed by b. GCC before 12 lacks clang's name for it.
template <int... I>
LILY_INLINE VF permute(VF a, VF b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, VI{I...});
#endif
}
template <int First, int... I>
LILY_INLINE VF every_other(VF a, VF b, std::integer_sequence<int, I...>) {
  return permute<First + 2 * I...>(a, b);
}
LILY_INLINE VF even(VF a, VF b) { return every_other<0>(a, b, std::make_integer_sequence<int, kWidth>{}); }
LILY_INLINE VF odd(VF a, VF b) { return every_other<1>(a, b, std::make_integer_sequence<int, kWidth>{}); }

// out[i] is the sum of the lanes of v[i]; N is a multiple of four. It has the bits of hsum(v[i]), whatever N is.
template <int N>
LILY_INLINE void lane_sums(const VF (&v)[N], float* out) {
  static_assert(N % 4 == 0);
  for (int i = 0; i < N; i += 4) {
    const V4 sums = hsum4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    std::memcpy(out + i, &sums, sizeof sums);
  }
}

// The four streams of 4·kWidth floats a0 b0 c0 d0 a1 b1 c1 d1 ...
LILY_INLINE void deinterleave4(const float* p, VF (&out)[4]) {
  const VF v0 = load(p), v1 = load(p + kWidth), v2 = load(p + 2 * kWidth), v3 = load(p + 3 * kWidth);
  const VF ac0 = even(v0, v1), ac1 = even(v2, v3), bd0 = odd(v0, v1), bd1 = odd(v2, v3);
  out[0] = even(ac0, ac1);
  out[1] = even(bd0, bd1);
  out[2] = odd(ac0, ac1);
  out[3] = odd(bd0, bd1);
}

// The first n floats at p, at most kWidth, and `fill` in the other lanes: tails with the arithmetic of whole vectors.
LILY_INLINE VF load_part(const float* p, int64_t n, float fill = 0.0f) {
  if (n >= kWidth) return load(p);
  VF v = broadcast(fill);
  std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
  return v;
}
LILY_INLINE void store_part(float* p, VF v, int64_t n) {
  if (n >= kWidth) return store(p, v);
  std::memcpy(p, &v, static_cast<size_t>(n) * sizeof(float));
}

}  // namespace lily::LILY_ISA
