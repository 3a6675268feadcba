// Products of a few token rows with rows of a packed matrix: what decode is made of.
//
// Per group Σ w·x = scale·Σ code·x + bias·Σ x (model_spec §3). The input is prepared once a dispatch and thread: its
// columns in the order in which one load of words yields them, multiplied by the power of two that makes up for
// codes that are masked out of their words but not shifted down. One vector of weights then costs a mask, a
// conversion and a multiply-add.
#pragma once

#include "abi.h"
#include "matrix.h"

namespace lily::LILY_ISA {

constexpr uint32_t kQuad = 4;       // matrix rows computed together, sharing the loads of x
constexpr uint32_t kMaxTokens = 8;  // token rows of one call

// Floats of a row's scales, padded; and of one prepared token row: its values, then the sums of its groups.
// lily_builtin/cpu_matrix.py computes the same.
constexpr uint32_t padded_groups(uint32_t cols) { return round_up(cols / kMinGroup, 16) + 16; }
constexpr uint32_t padded_cols(uint32_t cols) { return round_up(cols, kMaxBlock); }
constexpr uint32_t input_floats(uint32_t cols) { return padded_cols(cols) + padded_groups(cols); }

// Prepared token rows, `stride` floats apart.
struct Input {
  const float* values;
  const float* sums;
  uint32_t stride;

  Input row(uint32_t token) const {
    return {values + uint64_t{token} * stride, sums + uint64_t{token} * stride, stride};
  }
};

LILY_INLINE Input input_at(const float* prepared, uint32_t cols) {
  return {prepared, prepared + padded_cols(cols), input_floats(cols)};
}

// One token row x[cols] in the form that `m` multiplies, into input_floats(cols) floats.
void prepare_input(const Matrix& m, const float* x, float* out);

// acc[r·tokens + t] += vectors whose lanes add up to matrix row (first + r) · token row t, for r < 4 and 1, 2, 4 or 8
// tokens. Past the last row of the matrix the last one is repeated: a row's result never depends on its neighbours.
// `scales` is scratch of 4·padded_groups(cols) floats.
void multiply_quad(const Matrix& m, uint32_t first, const Input& x, uint32_t tokens, float* scales, VF* acc);

// Matrix rows begin .. end (begin a multiple of four) times `tokens` token rows; store(token, row, values, count)
// gets up to four values at a time. A quad of rows stays in the first-level cache for all tokens.
template <class Store>
LILY_INLINE void project(const Matrix& m, uint32_t begin, uint32_t end, const Input& x, uint32_t tokens, float* scales,
                         Store&& store_values) {
  for (uint32_t row = begin; row < end; row += kQuad) {
    const uint32_t count = end - row < kQuad ? end - row : kQuad;
    uint32_t some = kMaxTokens;
    for (uint32_t token = 0; token < tokens; token += some) {
      while (token + some > tokens) some /= 2;
      VF acc[kQuad * kMaxTokens] = {};
      multiply_quad(m, row, x.row(token), some, scales, acc);
      for (uint32_t t = 0; t < some; ++t) {
        const V4 sums = hsum4(acc[t], acc[some + t], acc[2 * some + t], acc[3 * some + t]);
        float values[kQuad];
        std::memcpy(values, &sums, sizeof values);
        store_values(token + t, row, values, count);
      }
    }
  }
}

// Worker scratch of the kernels here, in floats: the scales of a quad, one plain token row, the prepared inputs.
struct GemvScratch {
  float* scales;
  float* row;
  float* inputs;

  GemvScratch(const Call& call, Worker& worker, uint32_t cols, uint64_t prepared_floats) {
    const uint64_t scale_floats = uint64_t{kQuad} * padded_groups(cols);
    const uint64_t fixed = scale_floats + padded_cols(cols);
    scales = worker.take<float>(call, 0, fixed + prepared_floats);
    row = scales + scale_floats;
    inputs = scales + fixed;
  }
};

}  // namespace lily::LILY_ISA
