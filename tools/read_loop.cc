// A plain loop that reads memory and does nothing else: the bandwidth bound that decode is held against.
#include <cstdint>
#include <cstring>

#include "abi.h"

namespace {

constexpr uint64_t kChunk = 1 << 20;

// 0 data, 1 one word a task, so that the loop is not removed. A task is one chunk.
void read_loop(const lily::Call& call, uint32_t begin, uint32_t end, lily::Worker&) {
  const std::byte* data = call.at<const std::byte>(0, call.bytes(0));
  uint64_t* out = call.at<uint64_t>(1, call.tasks);
  typedef uint64_t Words __attribute__((vector_size(64)));
  for (uint32_t task = begin; task < end; ++task) {
    const uint64_t first = task * kChunk;
    const uint64_t last = first + kChunk < call.bytes(0) ? first + kChunk : call.bytes(0);
    Words a{}, b{};
    uint64_t i = first;
    for (; i + 2 * sizeof(Words) <= last; i += 2 * sizeof(Words)) {
      Words x, y;
      std::memcpy(&x, data + i, sizeof x);
      std::memcpy(&y, data + i + sizeof x, sizeof y);
      a ^= x;
      b ^= y;
    }
    a ^= b;
    uint64_t sum = 0;
    for (int lane = 0; lane < 8; ++lane) sum ^= a[lane];
    out[task] = sum;
  }
}

const lily::Kernel kKernels[] = {{"read_loop", read_loop, 2, 0}};
const lily::KernelTable kTable{lily::kAbiVersion, 1, kKernels};

}  // namespace

LILY_EXPORT_KERNELS(kTable)
