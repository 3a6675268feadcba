// Moves between the lanes of vectors: broadcast, transposition, sums of several vectors at once.
#pragma once

#include <utility>

#include "simd.h"

namespace lily::LILY_ISA {

// x - 0 is x whatever its sign, so this is one broadcast; 0 + x would have to turn -0 into 0.
LILY_INLINE VF broadcast(float x) { return x - VF{}; }

template <int... I>
constexpr VI lane_numbers(std::integer_sequence<int, I...>) {
  return VI{I...};
}
constexpr VI kLane = lane_numbers(std::make_integer_sequence<int, kWidth>{});

// f<0>(), f<1>(), ... f<N-1>()
template <class Function, int... I>
LILY_INLINE void unroll_sequence(Function&& f, std::integer_sequence<int, I...>) {
  (f.template operator()<I>(), ...);
}
template <int N, class Function>
LILY_INLINE void unroll(Function&& f) {
  unroll_sequence(f, std::make_integer_sequence<int, N>{});
}

// Lanes of a and b alternating, from lane `First` of each.
template <int First, int... I>
LILY_INLINE VF interleave_sequence(VF a, VF b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (First + I / 2 + (I % 2) * kWidth)...);
}
template <int First>
LILY_INLINE VF interleave(VF a, VF b) {
  return interleave_sequence<First>(a, b, std::make_integer_sequence<int, kWidth>{});
}

// kWidth × kWidth, in place: log2(kWidth) perfect shuffles of the whole square.
LILY_INLINE void transpose(VF (&v)[kWidth]) {
  constexpr int kHalf = kWidth / 2;
  for (int step = 1; step < kWidth; step *= 2) {
    VF next[kWidth];
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = interleave<0>(v[i], v[i + kHalf]);
      next[2 * i + 1] = interleave<kHalf>(v[i], v[i + kHalf]);
    }
    for (int i = 0; i < kWidth; ++i) v[i] = next[i];
  }
}

typedef float V4 __attribute__((vector_size(16)));

// The vector folded to four lanes, halves first.
LILY_INLINE V4 fold4(VF v) {
#if LILY_WIDTH == 4
  return v;
#elif LILY_WIDTH == 8
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return (__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 8, 9, 10, 11)) +
         (__builtin_shufflevector(v, v, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 12, 13, 14, 15));
#endif
}

// {sum of a, sum of b, sum of c, sum of d}
LILY_INLINE V4 hsum4(VF a, VF b, VF c, VF d) {
  const V4 w = fold4(a), x = fold4(b), y = fold4(c), z = fold4(d);
  const V4 wx = __builtin_shufflevector(w, x, 0, 1, 4, 5) + __builtin_shufflevector(w, x, 2, 3, 6, 7);
  const V4 yz = __builtin_shufflevector(y, z, 0, 1, 4, 5) + __builtin_shufflevector(y, z, 2, 3, 6, 7);
  return __builtin_shufflevector(wx, yz, 0, 2, 4, 6) + __builtin_shufflevector(wx, yz, 1, 3, 5, 7);
}

}  // namespace lily::LILY_ISA
