// The op families: each source file exports its kernels as one array.
#pragma once

#include <vector>

#include "abi.h"

namespace lily::LILY_ISA {

struct Family {
  const Kernel* kernels;
  uint32_t count;
};

std::vector<Family> families();

}  // namespace lily::LILY_ISA
