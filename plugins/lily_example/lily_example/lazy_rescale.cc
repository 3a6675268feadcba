#include "abi.h"
#include "simd.h"
#include "step.h"

namespace lily::LILY_ISA {
struct Constants {
  uint32_t heads, kv_heads, dim, page_tokens, slack;
};

LILY_INLINE VF load(const uint16_t* p) { return load_bf16(p); }
template <class T>  // of the cache: float, or uint16_t for bfloat16
void lazy_rescale(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const Constants& c = call.constants<Constants>();
  const uint32_t count = call.at<Step>(2, 1)->position + 1;
  const int32_t* pages = call.at<int32_t>(3, (count + c.page_tokens - 1) / c.page_tokens);
  for (uint32_t head = begin; head < end; ++head) {
    const auto at = [&](uint32_t index) { return call.at<float>(index, c.heads * c.dim) + head * c.dim; };
    float *q = at(0), *gate = at(1), *y = at(6);
    float total = 0.0f, reference = -INFINITY;
    std::memset(y, 0, c.dim * sizeof(float));
    for (uint32_t t = 0; t < count; ++t) {
      const uint64_t block = uint64_t(pages[t / c.page_tokens]) * c.kv_heads + head / (c.heads / c.kv_heads);
      const uint64_t row = (block * c.page_tokens + t % c.page_tokens) * c.dim;
      const T *k = call.at<T>(4, row + c.dim) + row, *v = call.at<T>(5, row + c.dim) + row;
      VF products{};
      for (uint32_t i = 0; i < c.dim; i += kWidth) products = fma(load(q + i), load(k + i), products);
      const float score = hsum(products) / std::sqrt(float(c.dim));
      if (score > reference + float(c.slack)) {
        // What is subtracted from every score cancels in the end: it need not be the maximum, only close to it.
        const VF keep = splat(std::exp(reference - score));
        for (uint32_t i = 0; i < c.dim; i += kWidth) store(y + i, load(y + i) * keep);
        total *= keep[0];
        reference = score;
      }
      const float weight = std::exp(score - reference);
      for (uint32_t i = 0; i < c.dim; i += kWidth) store(y + i, fma(load(v + i), splat(weight), load(y + i)));
      total += weight;
    }
    for (uint32_t i = 0; i < c.dim; i += kWidth) store(y + i, load(y + i) / total * sigmoid(load(gate + i)));
  }
}

const Kernel kKernels[] = {{"example_lazy_rescale_f32", lazy_rescale<float>, 7, sizeof(Constants)},
                           {"example_lazy_rescale_bf16", lazy_rescale<uint16_t>, 7, sizeof(Constants)}};
const KernelTable kTable{kAbiVersion, 2, kKernels};
}  // namespace lily::LILY_ISA

LILY_EXPORT_KERNELS(lily::LILY_ISA::kTable)
