// Products of many token rows with blocks of a packed matrix: what prefill is made of.
//
// Tokens are packed into panels of a tile of rows, [cols][rows of the tile], so that a vector holds one column of
// several tokens. A block of weight rows is dequantised into worker scratch, kDepth columns at a time, and multiplied
// with every tile before the next columns follow: the expanded matrix never exists. Sums are float32, in column order.
#pragma once

#include "abi.h"
#include "matrix.h"

namespace lily::LILY_ISA {

constexpr uint32_t kDepth = 256;       // columns dequantised at a time: a panel of them fits the first-level cache
constexpr uint32_t kBlockRows = 96;    // weight rows dequantised at a time, at most
constexpr uint32_t kTokenBlock = 256;  // tokens whose sums are kept while the columns pass, at most
constexpr uint32_t kMaxTile = 32;
// From one weight row's sums to the next one's: off the power of two, whose lines would share a few sets of the cache.
constexpr uint64_t kSumStride = kTokenBlock + 16;

// Tokens in tiles of `tile` (the last one narrower, a multiple of the vector). Columns lie in the order in which one
// load of words yields them, see Codec, and are padded with zeros to `depth`.
struct Panels {
  const float* data;
  uint32_t tokens;
  uint32_t tile;
  uint32_t depth;

  uint32_t width(uint32_t first) const {
    const uint32_t left = tokens - first;
    return left < tile ? round_up(left, kWidth) : tile;
  }
  const float* at(uint32_t first) const { return data + uint64_t{first} * depth; }
};

// Formats of one layout share panels.
constexpr uint32_t codes_of(Format format) { return format == kQ4 ? 8 : format == kQ8 ? 4 : 1; }
constexpr uint32_t depth_of(uint32_t cols, uint32_t codes) { return round_up(cols, codes * kWidth); }
constexpr uint32_t padded_depth(uint32_t cols) { return round_up(cols, kMaxBlock); }  // at most, in any layout

// Where column k of a row lies in a panel.
constexpr uint32_t packed_position(uint32_t k, uint32_t codes) {
  const uint32_t block = codes * kWidth;
  return k / block * block + k % codes * kWidth + k % block / codes;
}

// Rows `row[0 .. count)` of `cols` columns as one panel of `width` rows. With `norm`, columns are multiplied by it and
// rows by `scale`.
void pack_tile(const float* const* row, uint32_t count, uint32_t width, uint32_t cols, uint32_t codes,
               const float* norm, const float* scale, float* out);

// Tokens row_of(0) .. row_of(tokens - 1), of `cols` columns each, as panels at `out`.
template <class RowOf>
LILY_INLINE Panels pack_panels(uint32_t tokens, uint32_t tile, uint32_t cols, uint32_t codes, float* out,
                               RowOf&& row_of) {
  const Panels panels{out, tokens, tile, depth_of(cols, codes)};
  for (uint32_t first = 0; first < tokens; first += tile) {
    const uint32_t count = tokens - first < tile ? tokens - first : tile;
    const float* row[kMaxTile];
    for (uint32_t i = 0; i < count; ++i) row[i] = row_of(first + i);
    pack_tile(row, count, panels.width(first), cols, codes, nullptr, nullptr, out + uint64_t{first} * panels.depth);
  }
  return panels;
}

// Columns k .. k + count of `rows` rows from `first` as floats in panel order, rows kDepth apart. k and count are whole
// blocks of one load; columns past the row's end come out finite and meet zeros in the panels.
void dequantise(const Matrix& m, uint32_t first, uint32_t rows, uint32_t k, uint32_t count, float* out);

// sums[r][t] = Σ_k matrix[row + r][k] · token[first + t][k] for `rows` ≤ kBlockRows and `tokens` ≤ kTokenBlock, which
// start at a tile. `weights` holds kBlockRows · kDepth floats, `sums` kBlockRows rows kSumStride apart.
void multiply_rows(const Matrix& m, uint32_t row, uint32_t rows, const Panels& x, uint32_t first, uint32_t tokens,
                   float* weights, float* sums);

// Hands the sums over a token at a time, kWidth weight rows each: row_of(token, r, values, count).
template <class Function>
LILY_INLINE void for_each_token(const float* sums, uint32_t rows, uint32_t tokens, Function&& row_of) {
  for (uint32_t t = 0; t < tokens; t += kWidth) {
    const uint32_t present = tokens - t < kWidth ? tokens - t : kWidth;
    for (uint32_t r = 0; r < rows; r += kWidth) {
      const uint32_t count = rows - r < kWidth ? rows - r : kWidth;
      VF square[kWidth];
      for (int i = 0; i < kWidth; ++i) square[i] = load(sums + (r + i) * kSumStride + t);
      transpose(square);
      for (uint32_t i = 0; i < present; ++i) row_of(t + i, r, square[i], count);
    }
  }
}

// Sums as rows of y, `stride` floats apart.
inline void write_sums(const float* sums, uint32_t rows, uint32_t tokens, float* y, uint64_t stride, bool add) {
  for_each_token(sums, rows, tokens, [&](uint32_t token, uint32_t r, VF values, uint32_t count) {
    float* out = y + token * stride + r;
    if (count == kWidth) {
      store(out, add ? load(out) + values : values);
    } else {
      for (uint32_t i = 0; i < count; ++i) out[i] = add ? out[i] + values[i] : values[i];
    }
  });
}

// Worker scratch of a block: its weights as floats, then its sums.
struct GemmScratch {
  static constexpr uint64_t kFloats = kBlockRows * (kDepth + kSumStride);
  float* weights;
  float* sums;
  float* rest;

  GemmScratch(const Call& call, Worker& worker, uint64_t more_floats = 0) {
    weights = worker.take<float>(call, 0, kFloats + more_floats);
    sums = weights + uint64_t{kBlockRows} * kDepth;
    rest = weights + kFloats;
  }
};

}  // namespace lily::LILY_ISA
