// sample: the next token from one row of logits, on the device, so that its id need not come back between steps.
//
// In this order: penalties, mask, temperature, top-k, top-p, min-p, each on what the one before it left. Ids of equal
// logit rank by id, so every filter keeps a prefix of one ranking. The draw is an inverse CDF in order of id, with
// Philox keyed by the seed and counted by the tokens sampled so far: a seed gives the same tokens every time.
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "lane_sums.h"
#include "philox.h"
#include "step.h"

namespace lily::LILY_ISA {
namespace {

struct SampleConstants {
  uint32_t vocab;
  uint32_t advance;
};

constexpr float kNone = -INFINITY;
constexpr float kLargest = 3.402823466e38f;
constexpr uint32_t kPadding = 64;    // scratch arrays are filled up to a multiple with ids that can't be drawn
constexpr uint32_t kChunk = 256;     // weights added up together
constexpr uint32_t kBuckets = 2048;  // of the histogram that finds where top-p ends
constexpr float kBucketsPerUnit = kBuckets / 88.0f;  // e^-88 is the least positive float weight

uint32_t padded(uint32_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

typedef uint8_t VB __attribute__((vector_size(LILY_WIDTH)));

struct Vocabulary {
  const float* logits;
  const uint8_t* mask;
  const int32_t* seen;  // in the context
  const int32_t* generated;
  uint32_t size;
  float repetition, presence, frequency;

  bool penalised() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};

template <class V, class T>
LILY_INLINE V load_some(const T* p, uint32_t n) {
  V v{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}

// The logits of ids i, i + 1, ... after penalties; -inf for ids that have no token or no number.
template <bool Penalties>
LILY_INLINE VF scores(const Vocabulary& v, uint32_t i, uint32_t n) {
  VF x = load_some<VF>(v.logits + i, n);
  if constexpr (Penalties) {
    const VI seen = load_some<VI>(v.seen + i, n), generated = load_some<VI>(v.generated + i, n);
    const VF repeated = x > 0.0f ? x / v.repetition : x * v.repetition;
    x = seen > 0 ? repeated : x;
    x -= generated > 0 ? broadcast(v.presence) : VF{};
    x -= to_float(generated) * v.frequency;
  }
  const VI known = __builtin_convertvector(load_some<VB>(v.mask + i, n), VI) != 0;
  return (known & (x == x)) != 0 ? min(x, broadcast(kLargest)) : broadcast(kNone);
}

template <bool Penalties, class Function>
LILY_INLINE void for_each(const Vocabulary& v, Function&& f) {
  uint32_t i = 0;
  for (; i + kWidth <= v.size; i += kWidth) f(i, scores<Penalties>(v, i, kWidth));
  if (i < v.size) f(i, scores<Penalties>(v, i, v.size - i));
}

struct Best {
  float value;
  uint32_t id;
};

// The largest score, the lowest id of equals. If nothing can be drawn, the lowest id that has a token.
template <bool Penalties>
Best best_of(const Vocabulary& v) {
  VF best = broadcast(kNone);
  VI at{};
  for_each<Penalties>(v, [&](uint32_t i, VF x) __attribute__((always_inline)) {
    const VI more = x > best;
    at = more ? kLane + static_cast<int32_t>(i) : at;
    best = more ? x : best;
  });
  Best found{hmax(best), UINT32_MAX};
  if (found.value == kNone) {
    const uint8_t* token = std::find_if(v.mask, v.mask + v.size, [](uint8_t known) { return known != 0; });
    return {kNone, token == v.mask + v.size ? 0 : static_cast<uint32_t>(token - v.mask)};
  }
  for (int lane = 0; lane < kWidth; ++lane)
    if (best[lane] == found.value) found.id = std::min(found.id, static_cast<uint32_t>(at[lane]));
  return found;
}

// What may be drawn, in order of id. Scratch arrays, as long as the padded vocabulary.
struct Candidates {
  float* score;     // later (score − largest) / temperature
  float* weight;    // e^score; 0 for what a filter left out
  int32_t* id;      // if `listed`; else candidate i is id i
  int32_t* member;  // room to work in
  uint32_t count;
  bool listed = false;

  uint32_t end() const { return padded(count); }
};

template <bool Penalties>
void list_all(const Vocabulary& v, Candidates& c) {
  for_each<Penalties>(v,
                      [&](uint32_t i, VF x) __attribute__((always_inline)) { store_part(c.score + i, x, v.size - i); });
  c.count = v.size;
  std::fill(c.score + c.count, c.score + c.end(), kNone);
}

struct Ranking {
  const float* score;
  bool operator()(int32_t a, int32_t b) const { return score[a] != score[b] ? score[a] > score[b] : a < b; }
};

bool any_above(const float* score, VF least) {
  VF top = load(score);
  for (uint32_t i = kWidth; i < kPadding; i += kWidth) top = max(top, load(score + i));
  const VI above = top > least;
  int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= above[lane];
  return any != 0;
}

// Keeps the k best. The list is cut back to k whenever it holds twice as many, so what is not among the best so far
// costs a comparison.
void keep_top_k(Candidates& c, uint32_t k) {
  if (k >= c.count) return;
  const uint32_t room = std::min(2 * k, c.count);
  const Ranking ranking{c.score};
  uint32_t listed = 0;
  float least = kNone;
  const auto cut = [&] {
    std::nth_element(c.id, c.id + k - 1, c.id + listed, ranking);
    least = c.score[c.id[k - 1]];
    listed = k;
  };
  for (uint32_t block = 0; block < c.end(); block += kPadding) {
    if (!any_above(c.score + block, broadcast(least))) continue;
    for (uint32_t i = block; i < block + kPadding; ++i) {
      if (!(c.score[i] > least)) continue;
      if (listed == room) cut();
      if (c.score[i] > least) c.id[listed++] = static_cast<int32_t>(i);
    }
  }
  if (listed > k) cut();
  std::sort(c.id, c.id + listed);
  for (uint32_t i = 0; i < listed; ++i) c.score[i] = c.score[c.id[i]];
  c.count = listed;
  c.listed = true;
  std::fill(c.score + c.count, c.score + c.end(), kNone);
}

void weigh(Candidates& c, float largest, float temperature) {
  for (uint32_t i = 0; i < c.end(); i += kWidth) {
    const VF score = (load(c.score + i) - largest) / temperature;
    store(c.score + i, score);
    store(c.weight + i, exp(score));
  }
}

float chunk_sum(const Candidates& c, uint32_t first) {
  VF sum{};
  for (uint32_t i = first; i < std::min(first + kChunk, c.end()); i += kWidth) sum += load(c.weight + i);
  return hsum(sum);
}

double total_weight(const Candidates& c) {
  double total = 0.0;
  for (uint32_t i = 0; i < c.end(); i += kChunk) total += chunk_sum(c, i);
  return total;
}

uint32_t bucket_of(float score) { return std::min(static_cast<uint32_t>(-score * kBucketsPerUnit), kBuckets - 1); }

// Of candidates [first, last) of the ranking, the last one that is kept if those kept must weigh `wanted` together.
int32_t last_kept(const Candidates& c, int32_t* first, int32_t* last, double wanted) {
  const Ranking ranking{c.score};
  double kept = 0.0;
  while (last - first > 16) {
    int32_t* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, ranking);
    double upper = 0.0;
    for (int32_t* i = first; i < middle; ++i) upper += c.weight[*i];
    if (kept + upper >= wanted) {
      last = middle;
    } else {
      kept += upper;
      first = middle;
    }
  }
  std::sort(first, last, ranking);
  for (; first + 1 < last; ++first)
    if ((kept += c.weight[*first]) >= wanted) break;
  return *first;
}

// The last candidate of the ranking that top-p keeps: the one with which the weights reach `wanted`. A histogram finds
// its neighbourhood, which alone is ranked.
int32_t top_p_end(const Candidates& c, double wanted) {
  double mass[kBuckets] = {};
  for (uint32_t i = 0; i < c.count; ++i)
    if (c.weight[i] > 0.0f) mass[bucket_of(c.score[i])] += c.weight[i];
  uint32_t bucket = 0, last_used = 0;
  double before = 0.0;
  for (; bucket < kBuckets; ++bucket) {
    if (mass[bucket] > 0.0) last_used = bucket;
    if (before + mass[bucket] >= wanted) break;
    before += mass[bucket];
  }
  if (bucket == kBuckets) before = 0.0, bucket = last_used;  // rounding: all are kept
  uint32_t members = 0;
  for (uint32_t i = 0; i < c.count; ++i)
    if (c.weight[i] > 0.0f && bucket_of(c.score[i]) == bucket) c.member[members++] = static_cast<int32_t>(i);
  return last_kept(c, c.member, c.member + members, wanted - before);
}

void keep_top_p(Candidates& c, float top_p) {
  const int32_t end = top_p_end(c, top_p * total_weight(c));
  const float least = c.score[end];
  for (uint32_t i = 0; i < c.end(); i += kWidth) {
    const VF score = load(c.score + i);
    const VI kept = (score > least) | ((score == least) & (kLane + static_cast<int32_t>(i) <= end));
    store(c.weight + i, kept ? load(c.weight + i) : VF{});
  }
}

// The largest weight is 1.
void keep_min_p(Candidates& c, float min_p) {
  for (uint32_t i = 0; i < c.end(); i += kWidth) {
    const VF weight = load(c.weight + i);
    store(c.weight + i, weight < min_p ? VF{} : weight);
  }
}

// The candidate at which the running sum of the weights passes `fraction` of their total.
uint32_t draw(const Candidates& c, double fraction) {
  const double wanted = fraction * total_weight(c);
  double passed = 0.0;
  uint32_t last = 0;
  for (uint32_t first = 0; first < c.end(); first += kChunk) {
    const double sum = chunk_sum(c, first);
    if (passed + sum <= wanted) {
      passed += sum;
      continue;
    }
    for (uint32_t i = first; i < std::min(first + kChunk, c.count); ++i) {
      if (c.weight[i] == 0.0f) continue;
      last = i;
      if ((passed += c.weight[i]) > wanted) return i;
    }
    return last;  // rounding: the chunk's sum in another order was a little larger
  }
  return last;
}

template <bool Penalties>
uint32_t choose(const Vocabulary& v, const Step& step, Candidates c) {
  const Best best = best_of<Penalties>(v);
  if (step.temperature == 0.0f || best.value == kNone) return best.id;
  list_all<Penalties>(v, c);
  if (step.top_k > 0) keep_top_k(c, static_cast<uint32_t>(step.top_k));
  weigh(c, best.value, step.temperature);
  if (step.top_p < 1.0f) keep_top_p(c, step.top_p);
  if (step.min_p > 0.0f) keep_min_p(c, step.min_p);
  const auto words = philox({static_cast<uint32_t>(step.count), 0, 0, 0}, {step.seed_low, step.seed_high});
  const uint32_t drawn = draw(c, uniform(words[0], words[1]));
  return c.listed ? static_cast<uint32_t>(c.id[drawn]) : drawn;
}

// 0 logits, 1 mask, 2 counts, 3 step, 4 scratch. One task.
void sample(const Call& call, uint32_t, uint32_t, Worker&) {
  const auto& constants = call.constants<SampleConstants>();
  const uint32_t size = constants.vocab, room = padded(size);
  const float* logits = call.at<const float>(0, size);
  const uint8_t* mask = call.at<const uint8_t>(1, size);
  int32_t* counts = call.at<int32_t>(2, 2 * uint64_t{size});
  Step& step = *call.at<Step>(3, 1);
  float* scratch = call.at<float>(4, 4 * uint64_t{room});
  const Vocabulary v{logits,
                     mask,
                     counts,
                     counts + size,
                     size,
                     step.repetition_penalty,
                     step.presence_penalty,
                     step.frequency_penalty};
  int32_t* lists = call.at<int32_t>(4, 4 * uint64_t{room}) + 2 * uint64_t{room};
  const Candidates c{scratch, scratch + room, lists, lists + room, 0};
  const uint32_t token = v.penalised() ? choose<true>(v, step, c) : choose<false>(v, step, c);

  step.token = static_cast<int32_t>(token);
  step.ring[static_cast<uint32_t>(step.count) % kRing] = step.token;
  step.count += 1;
  step.position += static_cast<int32_t>(constants.advance);
  counts[token] += 1;
  counts[size + token] += 1;
}

}  // namespace

extern const Kernel kSampleKernels[] = {{"sample", sample, 5, sizeof(SampleConstants)}};
extern const uint32_t kSampleKernelCount = 1;

}  // namespace lily::LILY_ISA
