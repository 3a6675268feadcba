#include "families.h"

namespace lily::LILY_ISA {

std::vector<Family> families() { return {}; }

}  // namespace lily::LILY_ISA
