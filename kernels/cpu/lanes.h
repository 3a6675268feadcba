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

typedef float V4 __attribute__((vector_size(16)));
typedef int32_t V4I __attribute__((vector_size(16)));

// Lane i of the result is lane I[i] of a followed by b. GCC before 12 lacks clang's name for it.
template <int... I>
LILY_INLINE VF shuffle(VF a, VF b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, VI{I...});
#endif
}
template <int... I>
LILY_INLINE V4 shuffle4(V4 a, V4 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, V4I{I...});
#endif
}

#if LILY_WIDTH == 8
// kWidth × kWidth, in place: squares of four inside the registers' halves, then the halves.
LILY_INLINE void transpose(VF (&v)[kWidth]) {
  VF square[8];
  for (int i = 0; i < 8; i += 4) {
    const VF a = shuffle<0, 8, 1, 9, 4, 12, 5, 13>(v[i], v[i + 1]);
    const VF b = shuffle<2, 10, 3, 11, 6, 14, 7, 15>(v[i], v[i + 1]);
    const VF c = shuffle<0, 8, 1, 9, 4, 12, 5, 13>(v[i + 2], v[i + 3]);
    const VF d = shuffle<2, 10, 3, 11, 6, 14, 7, 15>(v[i + 2], v[i + 3]);
    square[i] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(a, c);
    square[i + 1] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(a, c);
    square[i + 2] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(b, d);
    square[i + 3] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(b, d);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(square[i], square[i + 4]);
    v[i + 4] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(square[i], square[i + 4]);
  }
}
#else
// Lanes of a and b alternating, from lane `First` of each.
template <int First, int... I>
LILY_INLINE VF interleave_sequence(VF a, VF b, std::integer_sequence<int, I...>) {
  return shuffle<(First + I / 2 + (I % 2) * kWidth)...>(a, b);
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
#endif

// The vector folded to four lanes, halves first.
LILY_INLINE V4 fold4(VF v) {
  V4 quarter[kWidth / 4];
  std::memcpy(quarter, &v, sizeof v);
  for (int step = kWidth / 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) quarter[i] += quarter[i + step];
  return quarter[0];
}

// {sum of a, sum of b, sum of c, sum of d}
LILY_INLINE V4 hsum4(VF a, VF b, VF c, VF d) {
  const V4 w = fold4(a), x = fold4(b), y = fold4(c), z = fold4(d);
  const V4 wx = shuffle4<0, 1, 4, 5>(w, x) + shuffle4<2, 3, 6, 7>(w, x);
  const V4 yz = shuffle4<0, 1, 4, 5>(y, z) + shuffle4<2, 3, 6, 7>(y, z);
  return shuffle4<0, 2, 4, 6>(wx, yz) + shuffle4<1, 3, 5, 7>(wx, yz);
}

}  // namespace lily::LILY_ISA
