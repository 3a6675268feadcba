#include "families.h"

namespace lily::LILY_ISA {

#define LILY_FAMILIES(use)                                                                                     \
  use(AttentionDecode) use(AttentionPrefill) use(AttentionPrepare) use(DeltanetBlockwise) use(DeltanetPrepare) \
      use(DeltanetScan) use(Embed) use(ExpertsCombine) use(ExpertsGemm) use(ExpertsGemv) use(Gemm) use(Gemv)   \
          use(Group) use(Route) use(Sample)

#define LILY_DECLARE_FAMILY(name)         \
  extern const Kernel k##name##Kernels[]; \
  extern const uint32_t k##name##KernelCount;
LILY_FAMILIES(LILY_DECLARE_FAMILY)

std::vector<Family> families() {
#define LILY_LIST_FAMILY(name) {k##name##Kernels, k##name##KernelCount},
  return {LILY_FAMILIES(LILY_LIST_FAMILY)};
}

}  // namespace lily::LILY_ISA
