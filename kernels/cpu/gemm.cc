// Dense projections of a chunk of token rows: one dispatch packs the tokens (and normalises them), one multiplies all
// matrices that share them, the residual sum included.
#include "gemm.h"

#include "rms_norm.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kMaxParts = 4;
constexpr uint32_t kMaxLayouts = 3;

struct PackConstants {
  uint32_t tokens;
  uint32_t cols;
  uint32_t tile;
  uint32_t layouts;
  uint32_t codes[kMaxLayouts];  // of each layout, see codes_of
  uint32_t normalize;
  float eps;
  uint32_t layout_floats;  // from one layout's panels to the next one's
  uint32_t reserved[2];
};

// Buffers: x, norm, panels. A task is a tile of tokens.
void gemm_pack(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<PackConstants>();
  const float* x = call.at<const float>(0, uint64_t{c.tokens} * c.cols);
  const float* norm = c.normalize ? call.at<const float>(1, c.cols) : nullptr;
  float* panels = call.at<float>(2, uint64_t{c.layouts} * c.layout_floats);
  for (uint32_t first = begin * c.tile; first < c.tokens && first < end * c.tile; first += c.tile) {
    const uint32_t count = c.tokens - first < c.tile ? c.tokens - first : c.tile;
    const float* row[kMaxTile];
    float scale[kMaxTile];
    for (uint32_t i = 0; i < count; ++i) {
      row[i] = x + uint64_t{first + i} * c.cols;
      if (norm != nullptr) scale[i] = rms_scale(row[i], c.cols, c.eps);
    }
    for (uint32_t layout = 0; layout < c.layouts; ++layout) {
      float* out = panels + uint64_t{layout} * c.layout_floats + uint64_t{first} * depth_of(c.cols, c.codes[layout]);
      pack_tile(row, count, round_up(count, kWidth), c.cols, c.codes[layout], norm, scale, out);
    }
  }
}

struct GemmConstants {
  uint32_t tokens;
  uint32_t cols;
  uint32_t tile;
  uint32_t block_rows;  // weight rows of a task
  uint32_t parts;
  uint32_t residual;
  uint32_t layout_floats;
  uint32_t reserved;
  MatrixShape part[kMaxParts];  // `input` is the layout
};

enum GemmBuffer : uint32_t {
  kPanels,
  kMatrices,
  kOutputs = kMatrices + 3 * kMaxParts,
  kGemmBuffers = kOutputs + kMaxParts
};

// Buffers: panels, then weight, scales and biases of each part, then the output of each part. A task is a block of
// weight rows of one part, for all tokens.
void gemm(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<GemmConstants>();
  if (c.block_rows > kBlockRows) fail(call.name, "cannot hold a block of that many rows");
  const GemmScratch scratch(call, worker);
  uint32_t first = 0;  // task of the part's row 0
  for (uint32_t p = 0; p < c.parts; ++p) {
    const Matrix m = bind_matrix(call, kMatrices + 3 * p, c.part[p]);
    const uint32_t tasks = (m.rows + c.block_rows - 1) / c.block_rows;
    float* y = call.at<float>(kOutputs + p, uint64_t{c.tokens} * m.rows);
    const uint32_t depth = depth_of(c.cols, codes_of(m.format));
    const uint64_t layout = uint64_t{c.part[p].input} * c.layout_floats;
    const Panels x{call.at<const float>(kPanels, layout + uint64_t{round_up(c.tokens, kWidth)} * depth) + layout,
                   c.tokens, c.tile, depth};
    for (uint32_t task = begin > first ? begin : first; task < end && task < first + tasks; ++task) {
      const uint32_t row = (task - first) * c.block_rows;
      const uint32_t rows = m.rows - row < c.block_rows ? m.rows - row : c.block_rows;
      for (uint32_t token = 0; token < c.tokens; token += kTokenBlock) {
        const uint32_t tokens = c.tokens - token < kTokenBlock ? c.tokens - token : kTokenBlock;
        multiply_rows(m, row, rows, x, token, tokens, scratch.weights, scratch.sums);
        write_sums(scratch.sums, rows, tokens, y + uint64_t{token} * m.rows + row, m.rows, c.residual != 0 && p == 0);
      }
    }
    first += tasks;
  }
}

}  // namespace

extern const Kernel kGemmKernels[] = {
    {"gemm_pack", gemm_pack, 3, sizeof(PackConstants)},
    {"gemm", gemm, kGemmBuffers, sizeof(GemmConstants)},
};
extern const uint32_t kGemmKernelCount = sizeof(kGemmKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
