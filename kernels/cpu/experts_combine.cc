// The elementwise halves of the split expert variants: gated activation, and the weighted sum into the residual.
#include "abi.h"
#include "simd.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kTaskElements = 1024;
constexpr uint32_t kTaskColumns = 256;

struct ActivationConstants {
  uint32_t count;
  uint32_t reserved;
};

// Buffers: gate, up, out: out = silu(gate) · up. A task is a run of elements.
void silu_multiply(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const uint32_t count = call.constants<ActivationConstants>().count;
  const float* gate = call.at<const float>(0, count);
  const float* up = call.at<const float>(1, count);
  float* out = call.at<float>(2, count);
  const uint32_t last = end * kTaskElements < count ? end * kTaskElements : count;
  uint32_t i = begin * kTaskElements;
  for (; i + kWidth <= last; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < last; ++i) out[i] = silu1(gate[i]) * up[i];
}

struct SumConstants {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t hidden;
  uint32_t sorted;  // 1: rows of y are sorted by expert and found through `inverse`
};

// Buffers: y [tokens·top_k, hidden], shared y [tokens, hidden], weights, inverse, x: x += Σ weight · y + weight ·
// shared y, in the order of the choices. A task is a run of columns of one token.
void experts_sum(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<SumConstants>();
  const uint64_t slots = uint64_t{c.tokens} * c.top_k;
  const float* y = call.at<const float>(0, slots * c.hidden);
  const float* shared = call.at<const float>(1, uint64_t{c.tokens} * c.hidden);
  const float* weights = call.at<const float>(2, uint64_t{c.tokens} * (c.top_k + 1));
  const int32_t* inverse = c.sorted ? call.at<const int32_t>(3, slots) : nullptr;
  float* x = call.at<float>(4, uint64_t{c.tokens} * c.hidden);
  const uint32_t blocks = (c.hidden + kTaskColumns - 1) / kTaskColumns;
  for (uint32_t task = begin; task < end; ++task) {
    const uint64_t token = task / blocks;
    const uint32_t first = task % blocks * kTaskColumns;
    const uint32_t count = c.hidden - first < kTaskColumns ? c.hidden - first : kTaskColumns;
    const float* weight = weights + token * (c.top_k + 1);
    float sums[kTaskColumns] = {};
    for (uint32_t choice = 0; choice <= c.top_k; ++choice) {
      const uint64_t slot = token * c.top_k + choice;
      const float* row = choice == c.top_k
                             ? shared + token * c.hidden
                             : y + (inverse != nullptr ? static_cast<uint64_t>(inverse[slot]) : slot) * c.hidden;
      for (uint32_t i = 0; i < count; ++i) sums[i] += weight[choice] * row[first + i];
    }
    float* out = x + token * c.hidden + first;
    for (uint32_t i = 0; i < count; ++i) out[i] += sums[i];
  }
}

}  // namespace

extern const Kernel kExpertsCombineKernels[] = {
    {"silu_multiply", silu_multiply, 3, sizeof(ActivationConstants)},
    {"experts_sum", experts_sum, 5, sizeof(SumConstants)},
};
extern const uint32_t kExpertsCombineKernelCount = sizeof(kExpertsCombineKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
