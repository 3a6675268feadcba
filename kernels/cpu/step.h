// The step parameters of a session, as lily/step.py lays them out: what changes from token to token.
#pragma once

#include <cstdint>

namespace lily {

constexpr uint32_t kRing = 64;

struct Step {
  int32_t position;   // tokens in the cache before this step
  int32_t token;      // the next input
  int32_t count;      // tokens sampled so far: the ring's cursor and the random generator's counter
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: off
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  uint32_t seed_low;
  uint32_t seed_high;
  float frequency_penalty;
  int32_t reserved[4];
  int32_t ring[kRing];  // ring[i % kRing] is the i-th sampled token
};

}  // namespace lily
