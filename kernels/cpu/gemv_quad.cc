// The inner products of gemv.h, one instance a format and number of tokens.
#include "gemv.h"

namespace lily::LILY_ISA {
namespace {

template <Format F>
void prepare_values(const float* x, uint32_t cols, float* out) {
  constexpr int kCodes = Codec<F>::kCodes;
  for (uint32_t first = 0; first < cols; first += kBlock<F>) {
    const uint32_t present = cols - first < kBlock<F> ? cols - first : kBlock<F>;
    float block[kBlock<F>] = {};
    std::memcpy(block, x + first, present * sizeof(float));
    unroll<kCodes>([&]<int I>() {
      for (int lane = 0; lane < kWidth; ++lane)
        out[first + I * kWidth + lane] = block[lane * kCodes + I] * (1.0f / Codec<F>::shift(I));
    });
  }
}

float sum(const float* x, uint32_t n) {
  VF total{};
  for (uint32_t i = 0; i < n; i += kWidth) total += load(x + i);
  return hsum(total);
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
  if constexpr (!is_quantized(F)) std::memcpy(part, acc, sizeof part);
  unroll<Codec<F>::kCodes>([&]<int I>() __attribute__((always_inline)) {
    VF x[T];
    for (int t = 0; t < T; ++t) x[t] = load(values + t * x_stride + I * kWidth);
    for (int r = 0; r < R; ++r) {
      const VF code = Codec<F>::template shifted<I>(raw[r]);
      for (int t = 0; t < T; ++t) part[r][t] = is_quantized(F) && I == 0 ? code * x[t] : fma(code, x[t], part[r][t]);
    }
  });
  if constexpr (!is_quantized(F)) {
    std::memcpy(acc, part, sizeof part);
  } else {
    for (int r = 0; r < R; ++r) {
      const VF s = spread<S>(scale + r * scale_stride);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(s, part[r][t], acc[r][t]);
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
LILY_INLINE void multiply_rows(const Matrix& m, const uint32_t (&row)[R], const Input& x, float* scales,
                               VF (&acc)[R][T]) {
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
  const int shift = is_quantized(F) && S == 1 ? __builtin_ctz(m.group_size / kBlock<F>) : 0;  // blocks of a group
  const auto scale_of = [&](uint32_t b) { return scales + (S > 1 ? b * S : b >> shift); };
  const uint32_t blocks = m.cols / kBlock<F>;
  typename Codec<F>::Raw raw[R];
  for (uint32_t b = 0; b < blocks; ++b) {
    for (int r = 0; r < R; ++r) raw[r] = load_block<F>(weights[r] + b * kBlockBytes<F>);
    prefetch<R * kBlockBytes<F>>(weights[0] + b * R * kBlockBytes<F>);
    multiply_block<F, S, R, T>(raw, scale_of(b), stride, x.values + b * kBlock<F>, x.stride, acc);
  }
  if (const uint32_t rest = m.cols - blocks * kBlock<F>) {
    for (int r = 0; r < R; ++r) raw[r] = load_block<F>(weights[r] + blocks * kBlockBytes<F>, rest * bits_of(F) / 8);
    multiply_block<F, S, R, T>(raw, scale_of(blocks), stride, x.values + blocks * kBlock<F>, x.stride, acc);
  }
}

template <Format F, int S, int T>
void multiply_tokens(const Matrix& m, uint32_t first, const Input& x, float* scales, VF* acc) {
  constexpr int kRows = T == 1 ? 4 : T <= 4 ? 2 : 1;  // what 16 registers hold
  for (uint32_t r = 0; r < kQuad; r += kRows) {
    uint32_t row[kRows];
    for (uint32_t i = 0; i < kRows; ++i) row[i] = first + r + i < m.rows ? first + r + i : m.rows - 1;
    VF local[kRows][T];
    std::memcpy(local, acc + r * T, sizeof local);
    multiply_rows<F, S, kRows, T>(m, row, x, scales, local);
    std::memcpy(acc + r * T, local, sizeof local);
  }
}

}  // namespace

void prepare_input(const Matrix& m, const float* x, float* out) {
  visit(m, [&]<Format F, int S>() { prepare_values<F>(x, m.cols, out); });
  float* sums = out + padded_cols(m.cols);
  for (uint32_t g = 0; g < padded_groups(m.cols); ++g)
    sums[g] = g < m.groups ? sum(x + g * m.group_size, m.group_size) : 0.0f;
}

void multiply_quad(const Matrix& m, uint32_t first, const Input& x, uint32_t tokens, float* scales, VF* acc) {
  visit(m, [&]<Format F, int S>() {
    switch (tokens) {
      case 8:
        return multiply_tokens<F, S, 8>(m, first, x, scales, acc);
      case 4:
        return multiply_tokens<F, S, 4>(m, first, x, scales, acc);
      case 2:
        return multiply_tokens<F, S, 2>(m, first, x, scales, acc);
      default:
        return multiply_tokens<F, S, 1>(m, first, x, scales, acc);
    }
  });
}

}  // namespace lily::LILY_ISA
