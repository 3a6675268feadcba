// moe.group: the choices of all rows sorted by expert, and the blocks of rows that the grouped products work on.
#include <algorithm>

#include "abi.h"

namespace lily::LILY_ISA {
namespace {

struct GroupConstants {
  uint32_t choices;  // rows · top_k
  uint32_t experts;
  uint32_t max_blocks;
  uint32_t tile_rows;
};

// (expert, first sorted row, rows) of every block; the rest of the list has no rows.
void write_blocks(const Call& call, const GroupConstants& c, const int32_t* offsets, int32_t* blocks) {
  const auto tile = static_cast<int32_t>(c.tile_rows);
  uint32_t count = 0;
  for (uint32_t expert = 0; expert < c.experts; ++expert)
    for (int32_t first = offsets[expert]; first < offsets[expert + 1]; first += tile) {
      if (count == c.max_blocks) fail(call.name, "has more blocks than its block map holds");
      int32_t* block = blocks + 3 * count++;
      block[0] = static_cast<int32_t>(expert);
      block[1] = first;
      block[2] = std::min(tile, offsets[expert + 1] - first);
    }
  std::fill(blocks + 3 * count, blocks + 3 * uint64_t{c.max_blocks}, 0);
}

// 0 ids, 1 offsets, 2 order, 3 inverse, 4 blocks. One task: sixteen thousand choices take some tens of microseconds.
void group(const Call& call, uint32_t, uint32_t, Worker& worker) {
  const auto& c = call.constants<GroupConstants>();
  const int32_t* ids = call.at<const int32_t>(0, c.choices);
  int32_t* offsets = call.at<int32_t>(1, c.experts + 1);
  int32_t* order = call.at<int32_t>(2, c.choices);
  int32_t* inverse = call.at<int32_t>(3, c.choices);
  int32_t* blocks = call.at<int32_t>(4, 3 * uint64_t{c.max_blocks});
  int32_t* next = worker.take<int32_t>(call, 0, c.experts);

  std::fill(next, next + c.experts, 0);
  for (uint32_t i = 0; i < c.choices; ++i) {
    if (static_cast<uint32_t>(ids[i]) >= c.experts) fail(call.name, "was given an expert that does not exist");
    ++next[ids[i]];
  }
  offsets[0] = 0;
  for (uint32_t expert = 0; expert < c.experts; ++expert) {
    offsets[expert + 1] = offsets[expert] + next[expert];
    next[expert] = offsets[expert];
  }
  for (uint32_t i = 0; i < c.choices; ++i) {
    const int32_t row = next[ids[i]]++;
    order[row] = static_cast<int32_t>(i);
    inverse[i] = row;
  }
  write_blocks(call, c, offsets, blocks);
}

}  // namespace

extern const Kernel kGroupKernels[] = {{"moe_group", group, 5, sizeof(GroupConstants)}};
extern const uint32_t kGroupKernelCount = 1;

}  // namespace lily::LILY_ISA
