#include "isa.h"

namespace lily {

#define LILY_DECLARE(isa)     \
  namespace isa {             \
  const KernelTable* table(); \
  }
LILY_DECLARE(portable)
#if defined(__x86_64__)
LILY_DECLARE(avx2)
LILY_DECLARE(avx512)
#elif defined(__aarch64__)
LILY_DECLARE(neon)
#endif
#if defined(LILY_EMULATE_AVX512)
LILY_DECLARE(avx512_emulated)
#endif
#undef LILY_DECLARE

namespace {
bool always() { return true; }
#if defined(__x86_64__)
// F16C is older than AVX2 and on every processor that has it; clang before 16 can't ask for it.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
}  // namespace

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = {
#if defined(__x86_64__)
      {"avx512", avx512::table, has_avx512},
      {"avx2", avx2::table, has_avx2},
#elif defined(__aarch64__)
      {"neon", neon::table, always},
#endif
      {"portable", portable::table, always},
#if defined(LILY_EMULATE_AVX512)
      // The 16-lane kernels compiled for narrower registers: never chosen by itself, there for tests.
      {"avx512_emulated", avx512_emulated::table, has_avx2},
#endif
  };
  return sets;
}

}  // namespace lily
