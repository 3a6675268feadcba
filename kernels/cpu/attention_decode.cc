// attention.decode: one query row a head over the paged cache, online softmax, times σ(gate) (model_spec §5, step 4).
//
// The cache is walked in blocks of keys. Several query heads may share the loads of a block; what is computed for one
// head, and in which order, does not depend on how many do, so packing leaves every bit as it was.
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "lane_sums.h"
#include "paged_cache.h"
#include "step.h"

namespace lily::LILY_ISA {
namespace {

struct DecodeConstants {
  CacheShape cache;
  uint32_t heads;
  uint32_t pack;    // query heads a task serves, all of one key/value head
  uint32_t blocks;  // pieces the context is cut into; 1: no pieces, the task writes y itself
};

constexpr uint32_t kKeys = 32;  // of a block: their values wait in cache for the softmax
constexpr uint32_t kMaxPack = 8;
constexpr uint32_t kTile = 8;  // sums kept in registers at once
constexpr float kNone = -INFINITY;

// What a task knows of its query heads; rows of q, sum and scores follow each other.
struct Heads {
  uint32_t count;
  uint32_t dim;
  float* q;       // [count, dim], times dim^-1/2
  float* sum;     // [count, dim], Σ weight·value
  float* scores;  // [count, kKeys], then the weights
  float largest[kMaxPack];
  float total[kMaxPack];
};

// scores[h][j] = q[h]·key[j] for H heads and kTile / H keys.
template <int H, class T>
LILY_INLINE void score_tile(const Heads& heads, uint32_t head, T* const* keys, float (&out)[kTile]) {
  constexpr int kCount = kTile / H;
  VF sums[kTile] = {};
  for (uint32_t i = 0; i < heads.dim; i += kWidth) {
    VF key[kCount];
    for (int j = 0; j < kCount; ++j) key[j] = load_cached(keys[j] + i);
    for (int h = 0; h < H; ++h) {
      const VF query = load(heads.q + (head + h) * heads.dim + i);
      for (int j = 0; j < kCount; ++j) sums[h * kCount + j] = fma(query, key[j], sums[h * kCount + j]);
    }
  }
  lane_sums(sums, out);
}

// Values are brought in while the keys of their block are worked on, and the next keys while the values are.
template <class T>
LILY_INLINE void prefetch(const T* row, uint32_t count) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (uint32_t i = 0; i < count * sizeof(T); i += 64) __builtin_prefetch(bytes + i);
}

template <int H, class T>
LILY_INLINE void score_block(Heads& heads, T* const* keys, T* const* values, uint32_t count) {
  constexpr uint32_t kCount = kTile / H;
  for (uint32_t j = 0; j < count; j += kCount) {
    T* key[kCount];
    for (uint32_t i = 0; i < kCount; ++i) {
      key[i] = keys[std::min(j + i, count - 1)];
      if (j + i < count) prefetch(values[j + i], heads.dim);
    }
    for (uint32_t head = 0; head < heads.count; head += H) {
      float products[kTile];
      score_tile<H>(heads, head, key, products);
      for (uint32_t h = 0; h < H; ++h)
        std::memcpy(heads.scores + (head + h) * kKeys + j, products + h * kCount, sizeof(float) * kCount);
    }
  }
}

// Turns the scores of a block into weights relative to the largest score so far, and returns what earlier sums are
// multiplied by. Never inlined: every caller then runs the very same instructions.
[[gnu::noinline]] float weigh(float* scores, uint32_t count, float& largest, float& total) {
  std::fill(scores + count, scores + kKeys, kNone);
  VF top = load(scores);
  for (uint32_t j = kWidth; j < kKeys; j += kWidth) top = max(top, load(scores + j));
  const float reference = std::max(largest, hmax(top));
  VF sum{};
  for (uint32_t j = 0; j < kKeys; j += kWidth) {
    const VF weight = exp(load(scores + j) - reference);
    store(scores + j, weight);
    sum += weight;
  }
  const float keep = exp(broadcast(largest - reference))[0];
  largest = reference;
  total = total * keep + hsum(sum);
  return keep;
}

// sum[h] = keep[h]·sum[h] + Σ_j weight[h][j]·value[j], for H heads and V vectors of dimensions from `first`.
template <int H, int V, class T>
LILY_INLINE void add_tile(const Heads& heads, uint32_t head, uint32_t first, T* const* values, T* const* next,
                          uint32_t count, const float* keep) {
  VF sums[H][V];
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v)
      sums[h][v] = load(heads.sum + (head + h) * heads.dim + first + v * kWidth) * broadcast(keep[h]);
  const float* weights = heads.scores + head * kKeys;
  for (uint32_t j = 0; j < count; ++j) {
    if (head == 0) prefetch(next[j] + first, V * kWidth);
    VF value[V];
    for (int v = 0; v < V; ++v) value[v] = load_cached(values[j] + first + v * kWidth);
    for (int h = 0; h < H; ++h) {
      const VF weight = broadcast(weights[h * kKeys + j]);
      for (int v = 0; v < V; ++v) sums[h][v] = fma(weight, value[v], sums[h][v]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v) store(heads.sum + (head + h) * heads.dim + first + v * kWidth, sums[h][v]);
}

template <int H, class T>
LILY_INLINE void add_block(Heads& heads, T* const* values, T* const* next, uint32_t count) {
  constexpr int kVectors = kTile / H;
  for (uint32_t head = 0; head < heads.count; head += H) {
    float keep[H];
    for (int h = 0; h < H; ++h)
      keep[h] = weigh(heads.scores + (head + h) * kKeys, count, heads.largest[head + h], heads.total[head + h]);
    uint32_t i = 0;
    for (; i + kVectors * kWidth <= heads.dim; i += kVectors * kWidth)
      add_tile<H, kVectors>(heads, head, i, values, next, count, keep);
    for (; i < heads.dim; i += kWidth) add_tile<H, 1>(heads, head, i, values, next, count, keep);
  }
}

template <int H, class T>
void attend(Heads& heads, const PagedCache<T>& k_cache, const PagedCache<T>& v_cache, uint32_t kv_head, uint32_t first,
            uint32_t last) {
  T *keys[2][kKeys], *values[kKeys];
  uint32_t now = 0;
  k_cache.rows(kv_head, first, std::min(kKeys, last - first), keys[now]);
  for (uint32_t position = first; position < last; position += kKeys, now ^= 1) {
    const uint32_t count = std::min(kKeys, last - position), left = std::min(kKeys, last - position - count);
    v_cache.rows(kv_head, position, count, values);
    score_block<H>(heads, keys[now], values, count);
    std::copy(keys[now], keys[now] + count, keys[now ^ 1]);
    k_cache.rows(kv_head, position + count, left, keys[now ^ 1]);
    add_block<H>(heads, values, keys[now ^ 1], count);
  }
}

template <class T>
void attend(Heads& heads, const PagedCache<T>& k_cache, const PagedCache<T>& v_cache, uint32_t kv_head, uint32_t first,
            uint32_t last) {
  switch (heads.count) {
    case 1:
      return attend<1>(heads, k_cache, v_cache, kv_head, first, last);
    case 2:
      return attend<2>(heads, k_cache, v_cache, kv_head, first, last);
    default:
      return attend<4>(heads, k_cache, v_cache, kv_head, first, last);
  }
}

Heads heads_of(const Call& call, const DecodeConstants& c, Worker& worker) {
  Heads heads{};
  heads.count = c.pack;
  heads.dim = c.cache.head_dim;
  const uint64_t floats = uint64_t{c.pack} * heads.dim;
  heads.q = worker.take<float>(call, 0, floats);
  heads.sum = worker.take<float>(call, floats * sizeof(float), floats);
  heads.scores = worker.take<float>(call, 2 * floats * sizeof(float), c.pack * kKeys);
  return heads;
}

void start(Heads& heads, const float* q) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(heads.dim));
  for (uint32_t i = 0; i < heads.count * heads.dim; i += kWidth) {
    store(heads.q + i, load(q + i) * scale);
    store(heads.sum + i, VF{});
  }
  std::fill(heads.largest, heads.largest + kMaxPack, kNone);
  std::fill(heads.total, heads.total + kMaxPack, 0.0f);
}

[[gnu::noinline]] void finish(const float* sum, float total, const float* gate, uint32_t dim, float* y) {
  const VF share = broadcast(1.0f / total);
  for (uint32_t i = 0; i < dim; i += kWidth) store(y + i, load(sum + i) * share * sigmoid(load(gate + i)));
}

uint32_t context_of(const Call& call, uint32_t step) {
  return static_cast<uint32_t>(call.at<const Step>(step, 1)->position) + 1;
}

// 0 q, 1 gate, 2 step, 3 pages, 4 k_cache, 5 v_cache, 6 y. Task: a pack of query heads.
template <class T>
void decode(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<DecodeConstants>();
  const uint32_t dim = c.cache.head_dim, group = c.heads / c.cache.kv_heads;
  const float* q = call.at<const float>(0, uint64_t{c.heads} * dim);
  const float* gate = call.at<const float>(1, uint64_t{c.heads} * dim);
  const uint32_t context = context_of(call, 2);
  const PagedCache<const T> k_cache(call, 3, 4, c.cache), v_cache(call, 3, 5, c.cache);
  float* y = call.at<float>(6, uint64_t{c.heads} * dim);
  Heads heads = heads_of(call, c, worker);
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t head = task * c.pack;
    start(heads, q + head * dim);
    attend(heads, k_cache, v_cache, head / group, 0, context);
    for (uint32_t h = 0; h < c.pack; ++h)
      finish(heads.sum + h * dim, heads.total[h], gate + (head + h) * dim, dim, y + (head + h) * dim);
  }
}

// A piece of the context for one query head: Σ weight·value, then the largest score and Σ weight.
struct Pieces {
  float* data;
  uint32_t dim;
  uint32_t blocks;

  static constexpr uint32_t kExtra = 16;  // keeps rows on cache lines
  static uint64_t floats(const DecodeConstants& c) {
    return uint64_t{c.heads} * c.blocks * (c.cache.head_dim + kExtra);
  }
  float* at(uint32_t head, uint32_t block) const { return data + (uint64_t{head} * blocks + block) * (dim + kExtra); }
};

// 0 q, 1 step, 2 pages, 3 k_cache, 4 v_cache, 5 pieces. Task: (key/value head, block, pack of its query heads).
template <class T>
void decode_block(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<DecodeConstants>();
  const uint32_t dim = c.cache.head_dim, packs = c.heads / c.cache.kv_heads / c.pack;
  const float* q = call.at<const float>(0, uint64_t{c.heads} * dim);
  const uint32_t context = context_of(call, 1);
  const PagedCache<const T> k_cache(call, 2, 3, c.cache), v_cache(call, 2, 4, c.cache);
  const Pieces pieces{call.at<float>(5, Pieces::floats(c)), dim, c.blocks};
  const uint32_t per_block = (context + c.blocks * kKeys - 1) / (c.blocks * kKeys) * kKeys;
  Heads heads = heads_of(call, c, worker);
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t pack = task % packs, block = task / packs % c.blocks, kv_head = task / packs / c.blocks;
    const uint32_t head = (kv_head * packs + pack) * c.pack;
    const uint32_t first = std::min(block * per_block, context), last = std::min(first + per_block, context);
    start(heads, q + head * dim);
    attend(heads, k_cache, v_cache, kv_head, first, last);
    for (uint32_t h = 0; h < c.pack; ++h) {
      float* piece = pieces.at(head + h, block);
      std::memcpy(piece, heads.sum + h * dim, dim * sizeof(float));
      piece[dim] = heads.largest[h];
      piece[dim + 1] = heads.total[h];
    }
  }
}

// 0 pieces, 1 gate, 2 y. Task: one query head; its pieces are added in order.
void decode_combine(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<DecodeConstants>();
  const uint32_t dim = c.cache.head_dim;
  const Pieces pieces{call.at<float>(0, Pieces::floats(c)), dim, c.blocks};
  const float* gate = call.at<const float>(1, uint64_t{c.heads} * dim);
  float* y = call.at<float>(2, uint64_t{c.heads} * dim);
  float* sum = worker.take<float>(call, 0, dim);
  for (uint32_t head = begin; head < end; ++head) {
    float largest = kNone, total = 0.0f;
    for (uint32_t b = 0; b < c.blocks; ++b) largest = std::max(largest, pieces.at(head, b)[dim]);
    std::fill(sum, sum + dim, 0.0f);
    for (uint32_t b = 0; b < c.blocks; ++b) {
      const float* piece = pieces.at(head, b);
      if (piece[dim + 1] == 0.0f) continue;  // a block past the end of the context
      const VF share = exp(broadcast(piece[dim] - largest));
      total += share[0] * piece[dim + 1];
      for (uint32_t i = 0; i < dim; i += kWidth) store(sum + i, fma(share, load(piece + i), load(sum + i)));
    }
    finish(sum, total, gate + head * dim, dim, y + head * dim);
  }
}

}  // namespace

extern const Kernel kAttentionDecodeKernels[] = {
    {"attention_decode_f32", decode<float>, 7, sizeof(DecodeConstants)},
    {"attention_decode_bf16", decode<uint16_t>, 7, sizeof(DecodeConstants)},
    {"attention_decode_block_f32", decode_block<float>, 6, sizeof(DecodeConstants)},
    {"attention_decode_block_bf16", decode_block<uint16_t>, 6, sizeof(DecodeConstants)},
    {"attention_decode_combine", decode_combine, 3, sizeof(DecodeConstants)},
};
extern const uint32_t kAttentionDecodeKernelCount = 5;

}  // namespace lily::LILY_ISA
