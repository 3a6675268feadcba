// The instruction sets built into this binary, and which of them this processor runs.
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace lily {

struct InstructionSet {
  const char* name;
  const KernelTable* (*table)();
  bool (*supported)();
};

// Best first.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace lily
