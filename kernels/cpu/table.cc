// The kernels of one instruction set, gathered from the sources of each op family. Compiled once an instruction set.
#include <vector>

#include "abi.h"
#include "families.h"

namespace lily::LILY_ISA {

const KernelTable* table() {
  static const std::vector<Kernel> kernels = [] {
    std::vector<Kernel> all;
    for (const Family& family : families()) all.insert(all.end(), family.kernels, family.kernels + family.count);
    return all;
  }();
  static const KernelTable result{kAbiVersion, static_cast<uint32_t>(kernels.size()), kernels.data()};
  return &result;
}

}  // namespace lily::LILY_ISA
