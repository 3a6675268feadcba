// Rows of the embedding table (model_spec §4).
#include "gemm.h"

namespace lily::LILY_ISA {
namespace {

struct EmbedConstants {
  uint32_t tokens;
  uint32_t reserved;
  MatrixShape table;
};

// Buffers: token ids, weight, scales, biases, x. A task is a token row.
void embed_rows(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<EmbedConstants>();
  const Matrix table = bind_matrix(call, 1, c.table);
  const int32_t* ids = call.at<const int32_t>(0, c.tokens);
  float* x = call.at<float>(4, uint64_t{c.tokens} * table.cols);
  for (uint32_t token = begin; token < end; ++token) {
    const int32_t id = ids[token];
    if (id < 0 || static_cast<uint32_t>(id) >= table.rows) fail(call.name, "was given a token id outside the table");
    float* row = x + uint64_t{token} * table.cols;
    const uint32_t codes = codes_of(table.format);
    float columns[kDepth];
    for (uint32_t k = 0; k < table.cols; k += kDepth) {
      const uint32_t count = table.cols - k < kDepth ? table.cols - k : kDepth;
      dequantise(table, id, 1, k, depth_of(count, codes), columns);
      for (uint32_t i = 0; i < count; ++i) row[k + i] = columns[packed_position(i, codes)];
    }
  }
}

}  // namespace

extern const Kernel kEmbedKernels[] = {
    {"embed_rows", embed_rows, 5, sizeof(EmbedConstants)},
};
extern const uint32_t kEmbedKernelCount = sizeof(kEmbedKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
