// attention.prepare: q/k norm, rotary embedding, cache write, output-gate split (model specification §5, steps 1 to 3).
#include <cmath>

#include "abi.h"
#include "paged_cache.h"
#include "rms_norm.h"
#include "step.h"

namespace lily::LILY_ISA {
namespace {

struct PrepareConstants {
  CacheShape cache;
  uint32_t rows;
  uint32_t heads;
  uint32_t rotary_dim;
  float eps;
  double theta;
};

constexpr uint32_t kMaxRotary = 256;

// Cosines and sines of one position, for rotary_dim / 2 pairs of dimensions.
struct Angles {
  float cosine[kMaxRotary / 2];
  float sine[kMaxRotary / 2];
};

// Angular frequencies θ^(-2m / R), in worker scratch: they are the same for every row.
const double* frequencies(const Call& call, const PrepareConstants& c, Worker& worker) {
  double* out = worker.take<double>(call, 0, c.rotary_dim / 2);
  if (worker.first_entry(call))
    for (uint32_t m = 0; m < c.rotary_dim / 2; ++m) out[m] = std::pow(c.theta, -2.0 * m / c.rotary_dim);
  return out;
}

// In double: a float angle at position 262,143 would be off by a hundredth of a radian.
Angles angles(const double* frequency, uint32_t pairs, uint32_t position) {
  Angles out;
  for (uint32_t m = 0; m < pairs; ++m) {
    out.cosine[m] = static_cast<float>(std::cos(position * frequency[m]));
    out.sine[m] = static_cast<float>(std::sin(position * frequency[m]));
  }
  return out;
}

// Dimensions m and m + pairs turn by angle m.
void rotate(float* x, const Angles& angle, uint32_t pairs) {
  for (uint32_t m = 0; m < pairs; m += kWidth) {
    const VF a = load(x + m), b = load(x + pairs + m), cosine = load(angle.cosine + m), sine = load(angle.sine + m);
    store(x + m, a * cosine - b * sine);
    store(x + pairs + m, b * cosine + a * sine);
  }
}

void copy(const float* from, uint32_t dim, float* to) { std::memcpy(to, from, dim * sizeof(float)); }

template <class T>
void write_row(const float* from, uint32_t dim, T* to) {
  for (uint32_t i = 0; i < dim; i += kWidth) store_cached(to + i, load(from + i));
}

// The query half of one row of u, normed, and its gate half.
void norm_queries(const PrepareConstants& c, const float* u, const float* norm, float* q, float* gate) {
  const uint32_t dim = c.cache.head_dim;
  for (uint32_t h = 0; h < c.heads; ++h) {
    rms_norm(u + 2 * h * dim, norm, dim, c.eps, q + h * dim);
    copy(u + (2 * h + 1) * dim, dim, gate + h * dim);
  }
}

// 0 u, 1 k, 2 v, 3 q_norm, 4 k_norm, 5 q, 6 gate, 7 step, 8 pages, 9 k_cache, 10 v_cache. Task: one row.
template <class T>
void prepare_fused(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<PrepareConstants>();
  const uint32_t dim = c.cache.head_dim, kv_heads = c.cache.kv_heads, pairs = c.rotary_dim / 2;
  const uint64_t width = uint64_t{c.heads} * dim, kv_width = uint64_t{kv_heads} * dim;
  const float* u = call.at<const float>(0, c.rows * width * 2);
  const float* k = call.at<const float>(1, c.rows * kv_width);
  const float* v = call.at<const float>(2, c.rows * kv_width);
  const float* q_norm = call.at<const float>(3, dim);
  const float* k_norm = call.at<const float>(4, dim);
  float* q = call.at<float>(5, c.rows * width);
  float* gate = call.at<float>(6, c.rows * width);
  const auto position = static_cast<uint32_t>(call.at<const Step>(7, 1)->position);
  const PagedCache<T> k_cache(call, 8, 9, c.cache), v_cache(call, 8, 10, c.cache);
  const double* frequency = frequencies(call, c, worker);
  float* key = worker.take<float>(call, pairs * sizeof(double), dim);
  for (uint64_t t = begin; t < end; ++t) {
    const auto at = static_cast<uint32_t>(position + t);
    const Angles angle = angles(frequency, pairs, at);
    norm_queries(c, u + t * width * 2, q_norm, q + t * width, gate + t * width);
    for (uint32_t h = 0; h < c.heads; ++h) rotate(q + t * width + h * dim, angle, pairs);
    for (uint32_t h = 0; h < kv_heads; ++h) {
      rms_norm(k + t * kv_width + h * dim, k_norm, dim, c.eps, key);
      rotate(key, angle, pairs);
      write_row(key, dim, k_cache.row(h, at));
      write_row(v + t * kv_width + h * dim, dim, v_cache.row(h, at));
    }
  }
}

// The same in three dispatches. 0 u, 1 k, 2 q_norm, 3 k_norm, 4 q, 5 gate, 6 normed keys. Task: one row.
void prepare_norm(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<PrepareConstants>();
  const uint32_t dim = c.cache.head_dim;
  const uint64_t width = uint64_t{c.heads} * dim, kv_width = uint64_t{c.cache.kv_heads} * dim;
  const float* u = call.at<const float>(0, c.rows * width * 2);
  const float* k = call.at<const float>(1, c.rows * kv_width);
  const float* q_norm = call.at<const float>(2, dim);
  const float* k_norm = call.at<const float>(3, dim);
  float* q = call.at<float>(4, c.rows * width);
  float* gate = call.at<float>(5, c.rows * width);
  float* keys = call.at<float>(6, c.rows * kv_width);
  for (uint64_t t = begin; t < end; ++t) {
    norm_queries(c, u + t * width * 2, q_norm, q + t * width, gate + t * width);
    for (uint64_t i = t * kv_width; i < (t + 1) * kv_width; i += dim) rms_norm(k + i, k_norm, dim, c.eps, keys + i);
  }
}

// 0 q, 1 normed keys, 2 step; both turned in place. Task: one row.
void prepare_rotate(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<PrepareConstants>();
  const uint32_t dim = c.cache.head_dim, pairs = c.rotary_dim / 2;
  const uint64_t width = uint64_t{c.heads} * dim, kv_width = uint64_t{c.cache.kv_heads} * dim;
  float* q = call.at<float>(0, c.rows * width);
  float* keys = call.at<float>(1, c.rows * kv_width);
  const auto position = static_cast<uint32_t>(call.at<const Step>(2, 1)->position);
  const double* frequency = frequencies(call, c, worker);
  for (uint64_t t = begin; t < end; ++t) {
    const Angles angle = angles(frequency, pairs, static_cast<uint32_t>(position + t));
    for (uint64_t i = t * width; i < (t + 1) * width; i += dim) rotate(q + i, angle, pairs);
    for (uint64_t i = t * kv_width; i < (t + 1) * kv_width; i += dim) rotate(keys + i, angle, pairs);
  }
}

// 0 turned keys, 1 v, 2 step, 3 pages, 4 k_cache, 5 v_cache. Task: one row.
template <class T>
void prepare_write(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<PrepareConstants>();
  const uint32_t dim = c.cache.head_dim, kv_heads = c.cache.kv_heads;
  const uint64_t kv_width = uint64_t{kv_heads} * dim;
  const float* keys = call.at<const float>(0, c.rows * kv_width);
  const float* v = call.at<const float>(1, c.rows * kv_width);
  const auto position = static_cast<uint32_t>(call.at<const Step>(2, 1)->position);
  const PagedCache<T> k_cache(call, 3, 4, c.cache), v_cache(call, 3, 5, c.cache);
  for (uint64_t t = begin; t < end; ++t)
    for (uint32_t h = 0; h < kv_heads; ++h) {
      const auto at = static_cast<uint32_t>(position + t);
      write_row(keys + t * kv_width + h * dim, dim, k_cache.row(h, at));
      write_row(v + t * kv_width + h * dim, dim, v_cache.row(h, at));
    }
}

}  // namespace

extern const Kernel kAttentionPrepareKernels[] = {
    {"attention_prepare_f32", prepare_fused<float>, 11, sizeof(PrepareConstants)},
    {"attention_prepare_bf16", prepare_fused<uint16_t>, 11, sizeof(PrepareConstants)},
    {"attention_prepare_norm", prepare_norm, 7, sizeof(PrepareConstants)},
    {"attention_prepare_rotate", prepare_rotate, 3, sizeof(PrepareConstants)},
    {"attention_prepare_write_f32", prepare_write<float>, 6, sizeof(PrepareConstants)},
    {"attention_prepare_write_bf16", prepare_write<uint16_t>, 6, sizeof(PrepareConstants)},
};
extern const uint32_t kAttentionPrepareKernelCount = 6;

}  // namespace lily::LILY_ISA
