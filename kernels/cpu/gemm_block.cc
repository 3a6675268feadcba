// The blocks of gemm.h: packing, dequantisation, and the register tile of sums.
#include "gemm.h"

namespace lily::LILY_ISA {
namespace {

// Vector registers for sums; the weight and the tokens it meets need the rest.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr uint32_t kSums = 24;
#else
constexpr uint32_t kSums = 12;
#endif
static_assert(kBlockRows % kSums == 0);

template <bool Wide>
LILY_INLINE float load_scale(const uint8_t* p) {
  if constexpr (Wide) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return from_bf16(half);
}

// The scales of the S groups of one block, each over its lanes; groups past the row's end are 0.
template <bool Wide, int S>
LILY_INLINE VF block_scales(const uint8_t* row, uint32_t group, uint32_t groups) {
  float value[S] = {};
  for (int i = 0; i < S; ++i)
    if (group + i < groups) value[i] = load_scale<Wide>(row + (group + i) * (Wide ? 4u : 2u));
  return spread<S>(value);
}

// One block of columns of one row, as floats in panel order.
template <Format F, int S, bool Wide>
LILY_INLINE void dequantise_block(const Matrix& m, uint32_t row, typename Codec<F>::Raw raw, uint32_t group,
                                  float* out) {
  VF scale{}, bias{};
  if constexpr (is_quantized(F)) {
    scale = block_scales<Wide, S>(m.scale_row(row), group, m.groups);
    bias = block_scales<Wide, S>(m.bias_row(row), group, m.groups);
  }
  unroll<Codec<F>::kCodes>([&]<int I>() __attribute__((always_inline)) {
    const VF code = Codec<F>::template code<I>(raw);
    store(out + I * kWidth, is_quantized(F) ? fma(code, scale, bias) : code);
  });
}

template <Format F, int S, bool Wide>
void dequantise_rows(const Matrix& m, uint32_t first, uint32_t rows, uint32_t k, uint32_t count, float* out) {
  constexpr uint32_t kColumns = kBlock<F>;
  const int shift = is_quantized(F) ? __builtin_ctz(m.group_size) : 0;
  for (uint32_t r = 0; r < rows; ++r) {
    const uint8_t* weights = m.weight_row(first + r) + k / kColumns * kBlockBytes<F>;
    for (uint32_t i = 0; i < count; i += kColumns) {
      const uint8_t* p = weights + i / kColumns * kBlockBytes<F>;
      const uint32_t left = m.cols - (k + i);
      const auto raw = left >= kColumns ? load_block<F>(p) : load_block<F>(p, left * bits_of(F) / 8);
      const uint32_t group = is_quantized(F) ? (k + i) >> shift : 0;
      dequantise_block<F, S, Wide>(m, first + r, raw, group, out + r * kDepth + i);
    }
  }
}

// sums[r][tokens of the tile] += Σ_k weights[r][k] · panel[k][tokens], for a strip of weight rows held in registers.
template <uint32_t V>
constexpr uint32_t kStrip = kSums / V == 0 ? 1 : kSums / V;

template <uint32_t V>
LILY_INLINE void multiply_strip(const float* weights, const float* panel, uint32_t depth, bool fresh, float* sums) {
  constexpr uint32_t R = kStrip<V>;
  VF acc[R][V];
  for (uint32_t r = 0; r < R; ++r)
    for (uint32_t v = 0; v < V; ++v) acc[r][v] = fresh ? VF{} : load(sums + r * kSumStride + v * kWidth);
  for (const float* const end = weights + depth; weights != end; ++weights, panel += V * kWidth) {
    if constexpr (R < V) {  // the fewer operands stay in registers, next to the sums
      VF w[R];
      for (uint32_t r = 0; r < R; ++r) w[r] = broadcast(weights[r * kDepth]);
      for (uint32_t v = 0; v < V; ++v) {
        const VF x = load(panel + v * kWidth);
        for (uint32_t r = 0; r < R; ++r) acc[r][v] = fma(w[r], x, acc[r][v]);
      }
    } else {
      VF x[V];
      for (uint32_t v = 0; v < V; ++v) x[v] = load(panel + v * kWidth);
      for (uint32_t r = 0; r < R; ++r) {
        const VF w = broadcast(weights[r * kDepth]);
        for (uint32_t v = 0; v < V; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
      }
    }
  }
  for (uint32_t r = 0; r < R; ++r)
    for (uint32_t v = 0; v < V; ++v) store(sums + r * kSumStride + v * kWidth, acc[r][v]);
}

template <uint32_t V>
void multiply_tile(const float* weights, uint32_t rows, const float* panel, uint32_t depth, bool fresh, float* sums) {
  for (uint32_t r = 0; r < rows; r += kStrip<V>)
    multiply_strip<V>(weights + r * kDepth, panel, depth, fresh, sums + r * kSumStride);
}

using MultiplyTile = void (*)(const float*, uint32_t, const float*, uint32_t, bool, float*);

template <uint32_t... I>
constexpr MultiplyTile multiply_tile_of(uint32_t vectors, std::integer_sequence<uint32_t, I...>) {
  constexpr MultiplyTile kTiles[] = {multiply_tile<I + 1>...};
  return kTiles[vectors - 1];
}

template <uint32_t kCodes, bool kScaled>
void pack(const float* const* row, uint32_t count, uint32_t width, uint32_t cols, const float* norm, const float* scale,
          float* out) {
  for (uint32_t first = 0; first < width; first += kWidth) {
    // Rows past the last repeat it: their sums are never read.
    const float* source[kWidth];
    VF factor[kWidth];
    for (uint32_t j = 0; j < kWidth; ++j) {
      const uint32_t r = first + j < count ? first + j : count - 1;
      source[j] = row[r];
      if constexpr (kScaled) factor[j] = broadcast(scale[r]);
    }
    for (uint32_t k = 0; k < depth_of(cols, kCodes); k += kWidth) {
      const uint32_t present = k >= cols ? 0 : cols - k < kWidth ? cols - k : kWidth;
      const auto columns = [&](const float* p) __attribute__((always_inline)) {
        if (present == kWidth) return load(p + k);
        VF some{};
        if (present != 0) std::memcpy(&some, p + k, present * sizeof(float));
        return some;
      };
      VF square[kWidth];
      for (int j = 0; j < kWidth; ++j) square[j] = columns(source[j]);
      if constexpr (kScaled) {
        const VF weight = columns(norm);
        for (int j = 0; j < kWidth; ++j) square[j] = square[j] * factor[j] * weight;
      }
      transpose(square);
      for (int j = 0; j < kWidth; ++j) store(out + uint64_t{packed_position(k + j, kCodes)} * width + first, square[j]);
    }
  }
}

template <uint32_t kCodes>
void pack_columns(const float* const* row, uint32_t count, uint32_t width, uint32_t cols, const float* norm,
                  const float* scale, float* out) {
  if (norm != nullptr) return pack<kCodes, true>(row, count, width, cols, norm, scale, out);
  pack<kCodes, false>(row, count, width, cols, norm, scale, out);
}

}  // namespace

void pack_tile(const float* const* row, uint32_t count, uint32_t width, uint32_t cols, uint32_t codes,
               const float* norm, const float* scale, float* out) {
  switch (codes) {
    case 8:
      return pack_columns<8>(row, count, width, cols, norm, scale, out);
    case 4:
      return pack_columns<4>(row, count, width, cols, norm, scale, out);
    default:
      return pack_columns<1>(row, count, width, cols, norm, scale, out);
  }
}

void dequantise(const Matrix& m, uint32_t first, uint32_t rows, uint32_t k, uint32_t count, float* out) {
  visit(m, [&]<Format F, int S>() {
    m.wide_scales ? dequantise_rows<F, S, true>(m, first, rows, k, count, out)
                  : dequantise_rows<F, S, false>(m, first, rows, k, count, out);
  });
}

void multiply_rows(const Matrix& m, uint32_t row, uint32_t rows, const Panels& x, uint32_t first, uint32_t tokens,
                   float* weights, float* sums) {
  const uint32_t padded = round_up(rows, kSums);  // zeros complete the last strip
  if (padded > rows) std::memset(weights + rows * kDepth, 0, (padded - rows) * kDepth * sizeof(float));
  for (uint32_t k = 0; k < x.depth; k += kDepth) {
    const uint32_t count = x.depth - k < kDepth ? x.depth - k : kDepth;
    dequantise(m, row, rows, k, count, weights);
    for (uint32_t t = 0; t < tokens; t += x.tile) {
      const uint32_t width = x.width(first + t);
      const auto tile = multiply_tile_of(width / kWidth, std::make_integer_sequence<uint32_t, kMaxTile / kWidth>{});
      tile(weights, rows, x.at(first + t) + uint64_t{k} * width, count, k == 0, sums + t);
    }
  }
}

}  // namespace lily::LILY_ISA
