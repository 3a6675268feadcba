// deltanet.step and the direct deltanet.scan: the recurrence token by token, with the state's rows kept close.
#include <algorithm>

#include "deltanet.h"

namespace lily::LILY_ISA {
namespace {

struct ScanConstants {
  uint32_t rows;  // tokens
  uint32_t key_heads;
  uint32_t value_heads;
  uint32_t dim;    // of a head: columns and rows of its state
  uint32_t parts;  // tasks a head, each with dim / parts rows of its state
  float eps;
};

constexpr uint32_t kTokenBlock = 32;  // k̂ and q̂ of a block stay in the second-level cache while its row blocks pass
constexpr uint32_t kRowBlock = 32;    // rows of state that fit the first-level cache beside them

struct Operands {
  const float *q, *k, *v, *decay, *beta;
  float *state, *o;
};

Operands bind(const Call& call, const ScanConstants& c, uint32_t output) {
  const uint64_t keys = uint64_t{c.rows} * c.key_heads * c.dim, values = uint64_t{c.rows} * c.value_heads * c.dim;
  const uint64_t scalars = uint64_t{c.rows} * c.value_heads;
  return {call.at<const float>(0, keys),    call.at<const float>(1, keys),
          call.at<const float>(2, values),  call.at<const float>(3, scalars),
          call.at<const float>(4, scalars), call.at<float>(5, uint64_t{c.value_heads} * c.dim * c.dim),
          call.at<float>(output, values)};
}

Token token_at(const Operands& p, const ScanConstants& c, uint32_t head, uint32_t t) {
  const uint64_t key = (uint64_t{t} * c.key_heads + head / (c.value_heads / c.key_heads)) * c.dim;
  const uint64_t scalar = uint64_t{t} * c.value_heads + head;
  VF products{};
  for (uint32_t j = 0; j < c.dim; j += kWidth) products = fma(load(p.k + key + j), load(p.q + key + j), products);
  return {p.k + key, p.q + key, p.v + scalar * c.dim, p.decay[scalar], p.beta[scalar], hsum(products)};
}

// `count` tokens for rows that fit the first-level cache; `o` is the head's output for the first. tokens[count] is
// what follows, if `more` does.
void scan_block(const Rows& rows, const Token* tokens, uint32_t count, bool more, float* o, uint64_t o_row,
                Recall& recall) {
  for (uint32_t i = 0; i + 1 < count; ++i) advance_rows<true>(rows, tokens[i], tokens[i + 1], o + i * o_row, recall);
  const Token& last = tokens[count - 1];
  float* out = o + (count - 1) * o_row;
  if (more) {
    advance_rows<true>(rows, last, tokens[count], out, recall);
  } else {
    advance_rows<false>(rows, last, last, out, recall);
  }
}

// All tokens for some rows of a value head's state.
void scan_rows(const Operands& p, const ScanConstants& c, uint32_t head, uint32_t first_row, uint32_t last_row) {
  float* state = p.state + uint64_t{head} * c.dim * c.dim;
  const uint64_t o_row = uint64_t{c.value_heads} * c.dim;
  Recall recall;
  Token tokens[kTokenBlock + 1];
  tokens[0] = token_at(p, c, head, 0);
  recall_rows({state, first_row, last_row, c.dim}, tokens[0], recall);
  for (uint32_t t = 0; t < c.rows; t += kTokenBlock) {
    const uint32_t count = std::min(kTokenBlock, c.rows - t);
    const bool more = t + count < c.rows;
    for (uint32_t i = 1; i < count + more; ++i) tokens[i] = token_at(p, c, head, t + i);
    for (uint32_t row = first_row; row < last_row; row += kRowBlock)
      scan_block({state, row, std::min(row + kRowBlock, last_row), c.dim}, tokens, count, more,
                 p.o + t * o_row + uint64_t{head} * c.dim, o_row, recall);
    if (more) tokens[0] = tokens[count];
  }
}

// 0 q, 1 k, 2 v, 3 decay, 4 beta, 5 state, 6 o. Task: (value head, part of its rows), all tokens.
void scan(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<ScanConstants>();
  const Operands p = bind(call, c, 6);
  const uint32_t part_rows = c.dim / c.parts;
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t row = task % c.parts * part_rows;
    scan_rows(p, c, task / c.parts, row, row + part_rows);
  }
}

// 0 q, 1 k, 2 v, 3 decay, 4 beta, 5 state, 6 z, 7 norm, 8 y. Task: one value head of one token.
void step_fused(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<ScanConstants>();
  const Operands p = bind(call, c, 8);
  const float* z = call.at<const float>(6, uint64_t{c.value_heads} * c.dim);
  const float* norm = call.at<const float>(7, c.dim);
  for (uint32_t head = begin; head < end; ++head) {
    for (uint32_t row = 0; row < c.dim; row += kRowBlock) scan_rows(p, c, head, row, std::min(row + kRowBlock, c.dim));
    const uint64_t at = uint64_t{head} * c.dim;
    gated_norm_head(p.o + at, z + at, norm, p.o + at, c.dim, c.eps);
  }
}

// 0 o, updated to y, 1 z, 2 norm. Task: one token, all its heads.
void gated_norm(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<ScanConstants>();
  const uint64_t width = uint64_t{c.value_heads} * c.dim;
  float* o = call.at<float>(0, c.rows * width);
  const float* z = call.at<const float>(1, c.rows * width);
  const float* norm = call.at<const float>(2, c.dim);
  for (uint64_t i = begin * width; i < end * width; i += c.dim)
    gated_norm_head(o + i, z + i, norm, o + i, c.dim, c.eps);
}

}  // namespace

extern const Kernel kDeltanetScanKernels[] = {
    {"deltanet_scan", scan, 7, sizeof(ScanConstants)},
    {"deltanet_step_fused", step_fused, 9, sizeof(ScanConstants)},
    {"deltanet_gated_norm", gated_norm, 3, sizeof(ScanConstants)},
};
extern const uint32_t kDeltanetScanKernelCount = 3;

}  // namespace lily::LILY_ISA
