// The choice of experts from one row of router scores (model specification §7, step 1).
#pragma once

#include <algorithm>

#include "abi.h"
#include "lane_sums.h"

namespace lily::LILY_ISA {

constexpr uint32_t kMaxTopK = 64;

// Floats of scratch for `experts` scores.
constexpr uint32_t choice_floats(uint32_t experts) { return (experts + 15) / 16 * 16; }

// Index of the largest of n floats (whole vectors), the lowest of equals; at least one is above -inf.
LILY_INLINE uint32_t largest(const float* x, uint32_t n) {
  VF best = broadcast(-INFINITY);
  VI at{};
  for (uint32_t i = 0; i < n; i += kWidth) {
    const VF value = load(x + i);
    const VI more = value > best;
    at = more ? kLane + static_cast<int32_t>(i) : at;
    best = more ? value : best;
  }
  const float top = hmax(best);
  int32_t index = INT32_MAX;
  for (int lane = 0; lane < kWidth; ++lane)
    if (best[lane] == top) index = std::min(index, at[lane]);
  return static_cast<uint32_t>(index);
}

// ids[0 .. k): the experts of the largest scores, best first, ties by lowest id. weights[0 .. k): their softmax, and
// weights[k] = σ(shared). The softmax over all experts has the same denominator in every probability, so it cancels
// when those chosen are made to sum to 1. Scores that are not numbers come last; `work` is scratch.
LILY_INLINE void choose_experts(const float* scores, float shared, uint32_t experts, uint32_t k, float* work,
                                int32_t* ids, float* weights) {
  constexpr float kLowest = -3.402823466e38f;
  for (uint32_t i = 0; i < choice_floats(experts); i += kWidth) {
    const int64_t present = i < experts ? experts - i : 0;
    const VF score = load_part(scores + i, present, -INFINITY);
    const VF ranked = score > kLowest ? score : broadcast(kLowest);  // -inf marks what is taken or is no expert
    store(work + i, kLane < static_cast<int32_t>(present) ? ranked : broadcast(-INFINITY));
  }
  float chosen[kMaxTopK];
  for (uint32_t j = 0; j < k; ++j) {
    const uint32_t id = largest(work, choice_floats(experts));
    ids[j] = static_cast<int32_t>(id);
    chosen[j] = work[id];
    work[id] = -INFINITY;
  }
  float total = 0.0f;
  for (uint32_t j = 0; j < k; ++j) total += weights[j] = exp(broadcast(chosen[j] - chosen[0]))[0];
  for (uint32_t j = 0; j < k; ++j) weights[j] /= total;
  weights[k] = sigmoid1(shared);
}

}  // namespace lily::LILY_ISA
