// Dense projections of a few token rows: all matrices that share an input in one dispatch, the RMS norm before them
// and the residual sum after them included.
#include "gemv.h"

#include "rms_norm.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kMaxParts = 4;
constexpr uint32_t kTaskRows = 16;  // outputs a task computes

struct GemvConstants {
  uint32_t tokens;
  uint32_t cols;
  uint32_t parts;
  uint32_t inputs;  // distinct prepared forms of x
  uint32_t normalize;
  uint32_t residual;
  float eps;
  uint32_t reserved;
  MatrixShape part[kMaxParts];
};

enum GemvBuffer : uint32_t {
  kX,
  kNorm,
  kMatrices,
  kOutputs = kMatrices + 3 * kMaxParts,
  kGemvBuffers = kOutputs + kMaxParts
};

void prepare_inputs(const Call& call, const GemvConstants& c, const Matrix* part, const GemvScratch& scratch) {
  const float* x = call.at<const float>(kX, uint64_t{c.tokens} * c.cols);
  const float* norm = c.normalize ? call.at<const float>(kNorm, c.cols) : nullptr;
  for (uint32_t token = 0; token < c.tokens; ++token) {
    const float* row = x + uint64_t{token} * c.cols;
    if (norm != nullptr) {
      rms_norm(row, norm, c.cols, c.eps, scratch.row);
      row = scratch.row;
    }
    uint32_t next = 0;  // forms are numbered in the order in which the parts need them
    for (uint32_t p = 0; p < c.parts; ++p) {
      if (c.part[p].input != next) continue;
      prepare_input(part[p], row, scratch.inputs + (uint64_t{next} * c.tokens + token) * input_floats(c.cols));
      ++next;
    }
  }
}

// Buffers: x, norm, then weight, scales and biases of each part, then the output of each part.
void gemv(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<GemvConstants>();
  Matrix part[kMaxParts];
  for (uint32_t p = 0; p < c.parts; ++p) part[p] = bind_matrix(call, kMatrices + 3 * p, c.part[p]);
  const uint64_t form_floats = uint64_t{c.tokens} * input_floats(c.cols);
  const GemvScratch scratch(call, worker, c.cols, c.inputs * form_floats);
  if (worker.first_entry(call)) prepare_inputs(call, c, part, scratch);

  uint32_t first = 0;  // task of the part's row 0
  for (uint32_t p = 0; p < c.parts; ++p) {
    const uint32_t rows = part[p].rows;
    const uint32_t tasks = (rows + kTaskRows - 1) / kTaskRows;
    const uint32_t from = begin > first ? begin - first : 0;
    const uint32_t to = end < first + tasks ? end : first + tasks;
    if (first + from < to) {
      float* y = call.at<float>(kOutputs + p, uint64_t{c.tokens} * rows);
      const uint32_t last_row = (to - first) * kTaskRows < rows ? (to - first) * kTaskRows : rows;
      const Input x = input_at(scratch.inputs + c.part[p].input * form_floats, c.cols);
      const bool add = c.residual != 0 && p == 0;
      project(part[p], from * kTaskRows, last_row, x, c.tokens, scratch.scales,
              [&](uint32_t token, uint32_t row, const float* values, uint32_t count) {
                float* out = y + uint64_t{token} * rows + row;
                for (uint32_t i = 0; i < count; ++i) out[i] = add ? out[i] + values[i] : values[i];
              });
    }
    first += tasks;
  }
}

struct NormConstants {
  uint32_t tokens;
  uint32_t cols;
  float eps;
  uint32_t reserved;
};

// Buffers: x, norm, out. A task is a token row.
void norm_rows(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<NormConstants>();
  const float* x = call.at<const float>(0, uint64_t{c.tokens} * c.cols);
  const float* norm = call.at<const float>(1, c.cols);
  float* out = call.at<float>(2, uint64_t{c.tokens} * c.cols);
  for (uint64_t token = begin; token < end; ++token)
    rms_norm(x + token * c.cols, norm, c.cols, c.eps, out + token * c.cols);
}

}  // namespace

extern const Kernel kGemvKernels[] = {
    {"gemv", gemv, kGemvBuffers, sizeof(GemvConstants)},
    {"norm_rows", norm_rows, 3, sizeof(NormConstants)},
};
extern const uint32_t kGemvKernelCount = sizeof(kGemvKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
