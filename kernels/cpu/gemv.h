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

constexpr uint32_t kQuad = 4;      // matrix rows computed together, sharing the loads of x
constexpr uint32_t kMaxTokens = 8;  // token rows of one call

constexpr uint32_t round_up(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

// Floats of a row's scales, padded; and of one prepared token row: its values, then the sums of its groups.
// lily_builtin/cpu_weights.py computes the same.
constexpr uint32_t padded_groups(uint32_t cols) { return round_up(cols / kMinGroup, 16) + 16; }
constexpr uint32_t padded_cols(uint32_t cols) { return round_up(cols, kMaxBlock); }
constexpr uint32_t input_floats(uint32_t cols) { return padded_cols(cols) + padded_groups(cols); }

// Prepared token rows, `stride` floats apart.
struct Input {
  const float* values;
  const float* sums;
  uint32_t stride;

  Input row(uint32_t token) const { return {values + token * stride, sums + token * stride, stride}; }
};

LILY_INLINE Input input_at(const float* prepared, uint32_t cols) {
  return {prepared, prepared + padded_cols(cols), input_floats(cols)};
}

template <Format F>
void prepare_values(const float* x, uint32_t cols, float* out) {
  constexpr int kCodes = Codec<F>::kCodes;
  const uint32_t whole = cols / kBlock<F> * kBlock<F>;
  for (uint32_t first = 0; first < cols; first += kBlock<F>) {
    float tail[kBlock<F>] = {};
    const float* block = x + first;
    if (first >= whole) {
      std::memcpy(tail, block, (cols - first) * sizeof(float));
      block = tail;
    }
    unroll<kCodes>([&]<int I>() {
      for (int lane = 0; lane < kWidth; ++lane)
        out[first + I * kWidth + lane] = block[lane * kCodes + I] * (1.0f / Codec<F>::shift(I));
    });
  }
}

LILY_INLINE float sum(const float* x, uint32_t n) {
  VF total{};
  for (uint32_t i = 0; i < n; i += kWidth) total += load(x + i);
  return hsum(total);
}

// One token row x[cols] in the form that `m` multiplies, into input_floats(cols) floats.
inline void prepare_input(const Matrix& m, const float* x, float* out) {
  visit(m, [&]<Format F, int S>() { prepare_values<F>(x, m.cols, out); });
  float* sums = out + padded_cols(m.cols);
  for (uint32_t g = 0; g < padded_groups(m.cols); ++g)
    sums[g] = g < m.groups ? sum(x + g * m.group_size, m.group_size) : 0.0f;
}

// Turns the scales of R rows into floats, `stride` apart, and adds Σ bias·Σx of each row and token to acc.
template <bool Wide, int R, int T>
LILY_INLINE void start_groups(const Matrix& m, const uint32_t (&row)[R], const Input& x, float* scales, uint32_t stride,
                              VF (&acc)[R][T]) {
  constexpr uint32_t kBytes = Wide ? 4 : 2;
  const uint8_t* scale[R];
  const uint8_t* bias[R];
  for (int r = 0; r < R; ++r) scale[r] = m.scale_row(row[r]), bias[r] = m.bias_row(row[r]);
  const auto add = [&](uint32_t g, auto&& load_from) __attribute__((always_inline)) {
    VF sums[T];
    for (int t = 0; t < T; ++t) sums[t] = load(x.sums + t * x.stride + g);
    unroll<R>([&]<int r>() __attribute__((always_inline)) {
      store(scales + r * stride + g, load_from(scale[r] + g * kBytes));
      const VF b = load_from(bias[r] + g * kBytes);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(b, sums[t], acc[r][t]);
    });
  };
  uint32_t g = 0;
  for (; g + kWidth <= m.groups; g += kWidth) add(g, [](const uint8_t* p) { return load_scales<Wide>(p); });
  if (const uint32_t rest = m.groups - g) add(g, [rest](const uint8_t* p) { return load_scales<Wide>(p, rest); });
}

// acc[r][t] += this block of matrix rows · token rows; `scale` points at the block's first group of row 0.
template <Format F, int S, int R, int T>
LILY_INLINE void multiply_block(const typename Codec<F>::Raw (&raw)[R], const float* scale, uint32_t scale_stride,
                                const float* values, uint32_t x_stride, VF (&acc)[R][T]) {
  VF part[R][T];
  if constexpr (!is_quantized(F)) {
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) part[r][t] = acc[r][t];
  }
  unroll<Codec<F>::kCodes>([&]<int I>() __attribute__((always_inline)) {
    VF x[T];
    for (int t = 0; t < T; ++t) x[t] = load(values + t * x_stride + I * kWidth);
    for (int r = 0; r < R; ++r) {
      const VF code = Codec<F>::template shifted<I>(raw[r]);
      for (int t = 0; t < T; ++t) part[r][t] = is_quantized(F) && I == 0 ? code * x[t] : fma(code, x[t], part[r][t]);
    }
  });
  for (int r = 0; r < R; ++r) {
    if constexpr (is_quantized(F)) {
      const VF s = spread<S>(scale + r * scale_stride);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(s, part[r][t], acc[r][t]);
    } else {
      for (int t = 0; t < T; ++t) acc[r][t] = part[r][t];
    }
  }
}

// Rows lie end to end, so what the next rows need follows these rows' bytes in one stream, which processors fetch
// faster than a stream for each row.
constexpr uint64_t kAhead = 4096;
constexpr uint64_t kLine = 64;

template <uint64_t kBytes>
LILY_INLINE void prefetch(const uint8_t* p) {
  for (uint64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(p + kAhead + i);
}

template <Format F, int S, int R, int T>
LILY_INLINE void multiply_rows(const Matrix& m, const uint32_t (&row)[R], const Input& x, float* scales, VF (&acc)[R][T]) {
  const uint32_t stride = padded_groups(m.cols);
  if constexpr (is_quantized(F)) {
    if (m.wide_scales) {
      start_groups<true, R, T>(m, row, x, scales, stride, acc);
    } else {
      start_groups<false, R, T>(m, row, x, scales, stride, acc);
    }
  }
  const uint8_t* weights[R];
  for (int r = 0; r < R; ++r) weights[r] = m.weight_row(row[r]);
  // Blocks of a group are a power of two.
  const int shift = is_quantized(F) && S == 1 ? __builtin_ctz(m.group_size / kBlock<F>) : 0;
  const uint32_t blocks = m.cols / kBlock<F>;
  typename Codec<F>::Raw raw[R];
  for (uint32_t b = 0; b < blocks; ++b) {
    for (int r = 0; r < R; ++r) raw[r] = load_block<F>(weights[r] + b * kBlockBytes<F>);
    prefetch<R * kBlockBytes<F>>(weights[0] + b * R * kBlockBytes<F>);
    multiply_block<F, S, R, T>(raw, scales + (S > 1 ? b * S : b >> shift), stride, x.values + b * kBlock<F>, x.stride, acc);
  }
  if (const uint32_t rest = m.cols - blocks * kBlock<F>) {
    for (int r = 0; r < R; ++r) raw[r] = load_block<F>(weights[r] + blocks * kBlockBytes<F>, rest * bits_of(F) / 8);
    multiply_block<F, S, R, T>(raw, scales + (S > 1 ? blocks * S : blocks >> shift), stride, x.values + blocks * kBlock<F>,
                               x.stride, acc);
  }
}

// acc[r][t] += vectors whose lanes add up to matrix row (first + r) · token row t. Past the last row of the matrix
// the last one is repeated, so that a row's result never depends on its neighbours.
template <Format F, int S, int T>
[[gnu::noinline]] void multiply_quad(const Matrix& m, uint32_t first, const Input& x, float* scales, VF (*acc)[T]) {
  constexpr int kRows = T == 1 ? 4 : T <= 4 ? 2 : 1;  // what 16 registers hold
  for (uint32_t r = 0; r < kQuad; r += kRows) {
    uint32_t row[kRows];
    VF local[kRows][T];
    for (int i = 0; i < kRows; ++i) {
      row[i] = first + r + i < m.rows ? first + r + i : m.rows - 1;
      for (int t = 0; t < T; ++t) local[i][t] = acc[r + i][t];
    }
    multiply_rows<F, S, kRows, T>(m, row, x, scales, local);
    for (int i = 0; i < kRows; ++i)
      for (int t = 0; t < T; ++t) acc[r + i][t] = local[i][t];
  }
}

// The products of four matrix rows with T token rows: out[t] holds rows first .. first + 3.
template <int T>
LILY_INLINE void product_quad(const Matrix& m, uint32_t first, const Input& x, float* scales, V4 (&out)[T]) {
  VF acc[kQuad][T] = {};
  visit(m, [&]<Format F, int S>() { multiply_quad<F, S, T>(m, first, x, scales, acc); });
  for (int t = 0; t < T; ++t) out[t] = hsum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t]);
}

// Matrix rows begin .. end (begin a multiple of four) times `tokens` token rows; store(token, row, values, count)
// gets up to four values at a time. A quad of rows stays in the first-level cache for all tokens.
template <class Store>
LILY_INLINE void project(const Matrix& m, uint32_t begin, uint32_t end, const Input& x, uint32_t tokens, float* scales,
                         Store&& store_values) {
  for (uint32_t row = begin; row < end; row += kQuad) {
    const uint32_t count = end - row < kQuad ? end - row : kQuad;
    const auto some = [&]<int T>(uint32_t token) {
      V4 values[T];
      product_quad<T>(m, row, x.row(token), scales, values);
      for (int t = 0; t < T; ++t) store_values(token + t, row, reinterpret_cast<const float*>(&values[t]), count);
    };
    uint32_t token = 0;
    for (; token + 8 <= tokens; token += 8) some.template operator()<8>(token);
    if (tokens & 4) some.template operator()<4>(token), token += 4;
    if (tokens & 2) some.template operator()<2>(token), token += 2;
    if (tokens & 1) some.template operator()<1>(token);
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
