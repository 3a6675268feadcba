// The gated delta rule on rows of the state, and the norm that follows it (model specification §6, steps 6 and 7).
//
// Rows of the state are independent: s ← γs + δk̂ with δ = β(v − γ s·k̂), then o = s·q̂. Taking both products from the
// state before the update, o = γ s·q̂ + δ k̂·q̂, one pass can update the state with one token and multiply it with the
// next. What a pass yields is needed only in the next token's, so nothing waits for the sums.
#pragma once

#include "abi.h"
#include "lane_sums.h"

namespace lily::LILY_ISA {

constexpr uint32_t kMaxDeltaHead = 256;  // floats a head: sizes of arrays on the stack
constexpr uint32_t kDeltaRows = 4;       // state rows that share the loads of k̂ and q̂

struct Token {
  const float *k, *q, *v;
  float decay, beta, kq;  // γ, β, k̂·q̂
};

// The products of a row with k̂ and q̂ of the token to come.
struct Recall {
  float k[kMaxDeltaHead];
  float q[kMaxDeltaHead];
};

LILY_INLINE void keep_sums(const VF (&sums)[2 * kDeltaRows], Recall& recall, uint32_t row) {
  float products[2 * kDeltaRows];
  lane_sums(sums, products);
  std::memcpy(recall.k + row, products, kDeltaRows * sizeof(float));
  std::memcpy(recall.q + row, products + kDeltaRows, kDeltaRows * sizeof(float));
}

// A head's state and the rows of it that are meant.
struct Rows {
  float* state;
  uint32_t first, last;  // multiples of kDeltaRows
  uint32_t dim;
};

// The products of rows with a first token.
LILY_INLINE void recall_rows(const Rows& rows, const Token& first, Recall& recall) {
  const uint32_t dim = rows.dim;
  for (uint32_t r = rows.first; r < rows.last; r += kDeltaRows) {
    VF sums[2 * kDeltaRows] = {};
    for (uint32_t j = 0; j < dim; j += kWidth) {
      const VF key = load(first.k + j), query = load(first.q + j);
      for (uint32_t i = 0; i < kDeltaRows; ++i) {
        const VF row = load(rows.state + (r + i) * dim + j);
        sums[i] = fma(row, key, sums[i]);
        sums[kDeltaRows + i] = fma(row, query, sums[kDeltaRows + i]);
      }
    }
    keep_sums(sums, recall, r);
  }
}

// One token for rows whose products with it are in `recall`, which then holds those with `next`, if there is one.
template <bool Next>
LILY_INLINE void advance_rows(const Rows& rows, const Token& token, const Token& next, float* o, Recall& recall) {
  const uint32_t dim = rows.dim;
  const VF gamma = broadcast(token.decay);
  for (uint32_t r = rows.first; r < rows.last; r += kDeltaRows) {
    VF delta[kDeltaRows];
    for (uint32_t i = 0; i < kDeltaRows; ++i) {
      const float change = token.beta * (token.v[r + i] - token.decay * recall.k[r + i]);
      o[r + i] = token.decay * recall.q[r + i] + change * token.kq;
      delta[i] = broadcast(change);
    }
    VF sums[2 * kDeltaRows] = {};
    for (uint32_t j = 0; j < dim; j += kWidth) {
      const VF key = load(token.k + j);
      for (uint32_t i = 0; i < kDeltaRows; ++i) {
        float* at = rows.state + (r + i) * dim + j;
        const VF row = fma(delta[i], key, gamma * load(at));
        store(at, row);
        if constexpr (Next) {
          sums[i] = fma(row, load(next.k + j), sums[i]);
          sums[kDeltaRows + i] = fma(row, load(next.q + j), sums[kDeltaRows + i]);
        }
      }
    }
    if constexpr (Next) keep_sums(sums, recall, r);
  }
}

// y = RMS(o)·w·silu(z) over one head of `dim` values; y may be o.
LILY_INLINE void gated_norm_head(const float* o, const float* z, const float* w, float* y, uint32_t dim, float eps) {
  VF squares{};
  for (uint32_t i = 0; i < dim; i += kWidth) squares = fma(load(o + i), load(o + i), squares);
  const VF scale = broadcast(1.0f / std::sqrt(hsum(squares) / static_cast<float>(dim) + eps));
  for (uint32_t i = 0; i < dim; i += kWidth) store(y + i, load(o + i) * scale * load(w + i) * silu(load(z + i)));
}

}  // namespace lily::LILY_ISA
