// Products of small dense float matrices that lie in cache, by tiles of C held in registers.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace lily::LILY_ISA {

// A tile of C, a row of B and one broadcast must fit the registers: 32 of them in AVX-512 and NEON, else 16.
#if LILY_WIDTH == 16 || defined(__ARM_NEON)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kTileVectors = 2;
constexpr int64_t kPanel = kTileVectors * kWidth;

// The left operand, read element by element: (m, k) at data[m·row + k·step].
struct Left {
  const float* data;
  int64_t row;
  int64_t step;
};
// The right operand, read by panels of kPanel columns: (k, n) at data[n / kPanel · panel + k·row + n % kPanel].
struct Right {
  const float* data;
  int64_t panel;
  int64_t row;
};
LILY_INLINE Right row_major(const float* data, int64_t row) { return {data, kPanel, row}; }

// C = keep·C + A·B for R rows and V vectors of C; keep 0 does not read C.
template <int R, int V>
LILY_INLINE void product_tile(float* c, int64_t c_row, Left a, const float* b, int64_t b_row, int64_t depth,
                              float keep) {
  VF sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = keep == 0.0f ? VF{} : load(c + r * c_row + v * kWidth) * keep;
  for (int64_t k = 0; k < depth; ++k) {
    VF right[V];
    for (int v = 0; v < V; ++v) right[v] = load(b + k * b_row + v * kWidth);
    for (int r = 0; r < R; ++r) {
      const VF left = broadcast(a.data[r * a.row + k * a.step]);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(c + r * c_row + v * kWidth, sum[r][v]);
}

// The last rows, fewer than a tile has.
template <int R, int V>
void product_tail(int rows, float* c, int64_t c_row, Left a, const float* b, int64_t b_row, int64_t depth, float keep) {
  if constexpr (R > 0) {
    if (rows == R) return product_tile<R, V>(c, c_row, a, b, b_row, depth, keep);
    product_tail<R - 1, V>(rows, c, c_row, a, b, b_row, depth, keep);
  }
}

template <int V>
void product_panel(int64_t rows, float* c, int64_t c_row, Left a, const float* b, int64_t b_row, int64_t depth,
                   float keep) {
  for (int64_t m = 0; m < rows; m += kTileRows) {
    const Left tile{a.data + m * a.row, a.row, a.step};
    if (rows - m >= kTileRows) {
      product_tile<kTileRows, V>(c + m * c_row, c_row, tile, b, b_row, depth, keep);
    } else {
      product_tail<kTileRows - 1, V>(static_cast<int>(rows - m), c + m * c_row, c_row, tile, b, b_row, depth, keep);
    }
  }
}

// C[rows × columns] = keep·C + A·B over `depth`; columns is a multiple of kWidth.
inline void product(int64_t rows, int64_t columns, int64_t depth, Left a, Right b, float* c, int64_t c_row,
                    float keep) {
  for (int64_t n = 0; n < columns; n += kPanel) {
    const float* panel = b.data + n / kPanel * b.panel;
    if (columns - n >= kPanel) {
      product_panel<kTileVectors>(rows, c + n, c_row, a, panel, b.row, depth, keep);
    } else {
      product_panel<1>(rows, c + n, c_row, a, panel, b.row, depth, keep);
    }
  }
}

}  // namespace lily::LILY_ISA
