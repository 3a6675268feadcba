// attention.prefill: causal attention of a chunk over the paged cache, times σ(gate) (model_spec §5, step 4).
//
// Blocks of queries meet blocks of keys in cache, with online softmax (Dao et al. 2022, FlashAttention). All query
// heads of a key/value head are rows of one block, so they share the keys. Scratch does not grow with the context.
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "lanes.h"
#include "paged_cache.h"
#include "step.h"
#include "tile.h"

namespace lily::LILY_ISA {
namespace {

struct PrefillConstants {
  CacheShape cache;
  uint32_t rows;
  uint32_t heads;
  uint32_t block_rows;  // tokens of a query block
};

constexpr uint32_t kKeys = 64;  // of a block

// Worker scratch; a line of the three operands is one query head of one token.
struct Workspace {
  float* q;        // [lines, dim], times dim^-1/2
  float* sum;      // [lines, dim], Σ weight·value
  float* scores;   // [lines, kKeys], then the weights
  float* keys;     // [kKeys / kPanel][dim][kPanel], transposed
  float* values;   // [dim / kPanel][kKeys][kPanel]
  float* largest;  // [lines]
  float* total;    // [lines]
};

uint32_t round_to_panel(uint32_t n) { return static_cast<uint32_t>((n + kPanel - 1) / kPanel * kPanel); }

Workspace workspace(const Call& call, const PrefillConstants& c, uint32_t lines, Worker& worker) {
  const uint64_t dim = c.cache.head_dim, padded = (lines + 15) / 16 * 16;
  const uint64_t sizes[] = {
      lines * dim, lines * dim, lines * kKeys, kKeys * dim, kKeys * round_to_panel(c.cache.head_dim), padded, padded};
  float* starts[7];
  uint64_t total = 0;
  for (int i = 0; i < 7; ++i) {
    starts[i] = worker.take<float>(call, total * sizeof(float), sizes[i]);
    total += sizes[i];
  }
  return {starts[0], starts[1], starts[2], starts[3], starts[4], starts[5], starts[6]};
}

// Keys as the right operand of q·kᵀ; past `count` the last one is repeated, and its scores are masked.
template <class T>
void pack_keys(T* const* rows, uint32_t count, uint32_t dim, float* out) {
  for (uint32_t j = 0; j < kKeys; j += kWidth)
    for (uint32_t i = 0; i < dim; i += kWidth) {
      VF square[kWidth];
      for (uint32_t r = 0; r < uint32_t{kWidth}; ++r) square[r] = load_cached(rows[std::min(j + r, count - 1)] + i);
      transpose(square);
      float* to = out + j / kPanel * kPanel * dim + j % kPanel;
      for (uint32_t r = 0; r < uint32_t{kWidth}; ++r) store(to + (i + r) * kPanel, square[r]);
    }
}

template <class T>
void pack_values(T* const* rows, uint32_t count, uint32_t dim, float* out) {
  for (uint32_t j = 0; j < count; ++j)
    for (uint32_t i = 0; i < dim; i += kWidth)
      store(out + (i / kPanel * kKeys + j) * kPanel + i % kPanel, load_cached(rows[j] + i));
}

// Scores of one line to weights relative to its largest score so far; only the first `visible` keys count. Returns
// what earlier sums are multiplied by.
float weigh(float* scores, uint32_t visible, float& largest, float& total) {
  std::fill(scores + visible, scores + kKeys, -INFINITY);
  VF top = load(scores);
  for (uint32_t j = kWidth; j < kKeys; j += kWidth) top = max(top, load(scores + j));
  const float reference = std::max(largest, hmax(top));
  VF sum{};
  for (uint32_t j = 0; j < kKeys; j += kWidth) {
    const VF weight = exp(load(scores + j) - reference);
    store(scores + j, weight);
    sum += weight;
  }
  const float keep = largest == reference ? 1.0f : exp(broadcast(largest - reference))[0];
  largest = reference;
  total = total * keep + hsum(sum);
  return keep;
}

struct QueryBlock {
  uint32_t position;  // of its first token
  uint32_t tokens;
  uint32_t group;  // lines a token
  uint32_t dim;
  uint32_t lines() const { return tokens * group; }
};

template <class T>
void attend_block(const QueryBlock& b, const Workspace& w, T* const* keys, T* const* values, uint32_t first,
                  uint32_t count) {
  const uint32_t lines = b.lines(), dim = b.dim;
  pack_keys(keys, count, dim, w.keys);
  pack_values(values, count, dim, w.values);
  product(lines, kKeys, dim, {w.q, dim, 1}, {w.keys, kPanel * dim, kPanel}, w.scores, kKeys, 0.0f);
  for (uint32_t line = 0; line < lines; ++line) {
    const uint32_t position = b.position + line / b.group;
    const uint32_t visible = position < first ? 0 : std::min(count, position - first + 1);
    const float keep = weigh(w.scores + line * kKeys, visible, w.largest[line], w.total[line]);
    if (keep == 1.0f) continue;
    float* sum = w.sum + line * dim;
    for (uint32_t i = 0; i < dim; i += kWidth) store(sum + i, load(sum + i) * keep);
  }
  product(lines, dim, count, {w.scores, kKeys, 1}, {w.values, kPanel * kKeys, kPanel}, w.sum, dim, 1.0f);
}

// A block's query heads lie next to each other in each token's row.
void start(const QueryBlock& b, const float* q, uint64_t q_row, const Workspace& w) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(b.dim));
  const uint32_t width = b.group * b.dim;
  for (uint32_t t = 0; t < b.tokens; ++t)
    for (uint32_t i = 0; i < width; i += kWidth) store(w.q + t * width + i, load(q + t * q_row + i) * scale);
  std::fill(w.sum, w.sum + b.tokens * width, 0.0f);
  std::fill(w.largest, w.largest + b.lines(), -INFINITY);
  std::fill(w.total, w.total + b.lines(), 0.0f);
}

void finish(const QueryBlock& b, const Workspace& w, const float* gate, float* y, uint64_t y_row) {
  for (uint32_t line = 0; line < b.lines(); ++line) {
    const uint64_t at = line / b.group * y_row + line % b.group * b.dim;
    const float share = 1.0f / w.total[line];
    for (uint32_t i = 0; i < b.dim; i += kWidth)
      store(y + at + i, load(w.sum + line * b.dim + i) * share * sigmoid(load(gate + at + i)));
  }
}

// 0 q, 1 gate, 2 step, 3 pages, 4 k_cache, 5 v_cache, 6 y. Task: (query block, key/value head), the last block first:
// it sees the most keys.
template <class T>
void prefill(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<PrefillConstants>();
  const uint32_t dim = c.cache.head_dim, kv_heads = c.cache.kv_heads, group = c.heads / kv_heads;
  const uint64_t row = uint64_t{c.heads} * dim;
  const float* q = call.at<const float>(0, c.rows * row);
  const float* gate = call.at<const float>(1, c.rows * row);
  const auto position = static_cast<uint32_t>(call.at<const Step>(2, 1)->position);
  const PagedCache<const T> k_cache(call, 3, 4, c.cache), v_cache(call, 3, 5, c.cache);
  float* y = call.at<float>(6, c.rows * row);
  const Workspace w = workspace(call, c, c.block_rows * group, worker);
  const uint32_t blocks = (c.rows + c.block_rows - 1) / c.block_rows;
  const T *keys[kKeys], *values[kKeys];
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t t = (blocks - 1 - task / kv_heads) * c.block_rows, head = task % kv_heads;
    const QueryBlock block{position + t, std::min(c.block_rows, c.rows - t), group, dim};
    const uint64_t at = t * row + uint64_t{head} * group * dim;
    const uint32_t context = block.position + block.tokens;
    start(block, q + at, row, w);
    for (uint32_t first = 0; first < context; first += kKeys) {
      const uint32_t count = std::min(kKeys, context - first);
      k_cache.rows(head, first, count, keys);
      v_cache.rows(head, first, count, values);
      attend_block(block, w, keys, values, first, count);
    }
    finish(block, w, gate + at, y + at, row);
  }
}

}  // namespace

extern const Kernel kAttentionPrefillKernels[] = {
    {"attention_prefill_f32", prefill<float>, 7, sizeof(PrefillConstants)},
    {"attention_prefill_bf16", prefill<uint16_t>, 7, sizeof(PrefillConstants)},
};
extern const uint32_t kAttentionPrefillKernelCount = 2;

}  // namespace lily::LILY_ISA
