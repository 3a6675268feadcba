// Experts of a few token rows (model_spec §7): each chosen expert is a product of its own with one row.
#include "gemv.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kTaskRows = 16;  // outputs a task computes
constexpr uint32_t kRunRows = 64;   // outputs whose sums experts_out keeps while the experts pass

constexpr uint32_t blocks_of(uint32_t rows) { return (rows + kTaskRows - 1) / kTaskRows; }

// Matrix `id` of a stack.
Matrix chosen(const Call& call, const Matrix& stack, uint32_t experts, int32_t id) {
  if (id < 0 || static_cast<uint32_t>(id) >= experts) fail(call.name, "was given an expert id outside the stack");
  return stack.expert(id);
}

// Rows block·kTaskRows .. of m · x.
void multiply_block_rows(const Matrix& m, uint32_t block, const Input& x, float* scales, float (&out)[kTaskRows]) {
  const uint32_t first = block * kTaskRows;
  const uint32_t end = first + kTaskRows < m.rows ? first + kTaskRows : m.rows;
  project(m, first, end, x, 1, scales, [&](uint32_t, uint32_t row, const float* values, uint32_t) {
    std::memcpy(out + (row - first), values, kQuad * sizeof(float));
  });
}

void silu_product(const float* gate, const float* up, float* out, uint32_t count) {
  uint32_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < count; ++i) out[i] = silu1(gate[i]) * up[i];
}

struct ExpertsInConstants {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t inputs;  // distinct prepared forms of h
  uint32_t reserved;
  MatrixShape gate, up, shared_gate, shared_up;
};

// Buffers: h, ids, gate, up, shared gate, shared up (three each), act, shared act. Tasks are blocks of outputs: of each
// row and choice, then of each row's shared expert.
void experts_in_gemv(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsInConstants>();
  const MatrixShape* shape = &c.gate;
  Matrix matrix[4];
  for (uint32_t i = 0; i < 4; ++i) matrix[i] = bind_matrix(call, 2 + 3 * i, shape[i]);
  const uint32_t hidden = c.gate.cols, slots = c.tokens * c.top_k;
  const int32_t* ids = call.at<const int32_t>(1, slots);
  float* act = call.at<float>(14, uint64_t{slots} * c.gate.rows);
  float* shared_act = call.at<float>(15, uint64_t{c.tokens} * c.shared_gate.rows);

  const uint64_t form_floats = uint64_t{c.tokens} * input_floats(hidden);
  const GemvScratch scratch(call, worker, hidden, c.inputs * form_floats);
  if (worker.first_entry(call)) {
    const float* h = call.at<const float>(0, uint64_t{c.tokens} * hidden);
    for (uint32_t token = 0; token < c.tokens; ++token) {
      uint32_t next = 0;  // forms are numbered in the order in which the matrices need them
      for (uint32_t i = 0; i < 4; ++i) {
        if (shape[i].input != next) continue;
        float* out = scratch.inputs + next++ * form_floats + uint64_t{token} * input_floats(hidden);
        prepare_input(matrix[i], h + uint64_t{token} * hidden, out);
      }
    }
  }
  const auto input = [&](const MatrixShape& s, uint32_t token) {
    return input_at(scratch.inputs + s.input * form_floats, hidden).row(token);
  };
  const uint32_t blocks = blocks_of(c.gate.rows), shared_blocks = blocks_of(c.shared_gate.rows);
  for (uint32_t task = begin; task < end; ++task) {
    const bool routed = task < slots * blocks;
    const uint32_t index = routed ? task / blocks : (task - slots * blocks) / shared_blocks;  // slot or token
    const uint32_t block = routed ? task % blocks : (task - slots * blocks) % shared_blocks;
    const uint32_t token = routed ? index / c.top_k : index;
    const uint32_t first = routed ? 0 : 2;
    const uint32_t width = shape[first].rows;
    float gate[kTaskRows], up[kTaskRows];
    for (uint32_t i = 0; i < 2; ++i) {
      const MatrixShape& s = shape[first + i];
      const Matrix m = routed ? chosen(call, matrix[i], s.experts, ids[index]) : matrix[first + i];
      multiply_block_rows(m, block, input(s, token), scratch.scales, i == 0 ? gate : up);
    }
    const uint32_t row = block * kTaskRows;
    const uint32_t count = width - row < kTaskRows ? width - row : kTaskRows;
    silu_product(gate, up, (routed ? act : shared_act) + uint64_t{index} * width + row, count);
  }
}

struct ExpertsOutConstants {
  uint32_t tokens;
  uint32_t top_k;
  MatrixShape down, shared_down;
};

// One token's outputs from `first` on: x += Σ weight · down(act) + shared weight · shared_down(shared act).
struct ExpertsOutRow {
  const Call& call;
  const ExpertsOutConstants& c;
  const Matrix& down;
  const Matrix& shared_down;
  const int32_t* ids;
  const float* weights;
  const float* inputs;  // of the choices
  const float* shared_input;
  float* scales;

  void add(const Matrix& m, const Input& x, float weight, uint32_t first, uint32_t rows, VF* sums) const {
    for (uint32_t r = 0; r < rows; r += kQuad) {
      VF acc[kQuad] = {};
      multiply_quad(m, first + r, x, 1, scales, acc);
      for (uint32_t i = 0; i < kQuad; ++i) sums[r + i] = fma(broadcast(weight), acc[i], sums[r + i]);
    }
  }

  void update(uint32_t first, uint32_t rows, float* x) const {
    VF sums[kRunRows] = {};
    for (uint32_t choice = 0; choice < c.top_k; ++choice) {
      const Matrix m = chosen(call, down, c.down.experts, ids[choice]);
      add(m, input_at(inputs + choice * uint64_t{input_floats(m.cols)}, m.cols), weights[choice], first, rows, sums);
    }
    add(shared_down, input_at(shared_input, shared_down.cols), weights[c.top_k], first, rows, sums);
    for (uint32_t r = 0; r < rows; r += kQuad) {
      const V4 values = hsum4(sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
      for (uint32_t i = 0; i < kQuad && r + i < rows; ++i) x[first + r + i] += values[i];
    }
  }
};

// Buffers: act, shared act, ids, weights, down, shared down (three each), x. A task is a block of outputs of one row.
void experts_out_gemv(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsOutConstants>();
  const Matrix down = bind_matrix(call, 4, c.down), shared_down = bind_matrix(call, 7, c.shared_down);
  const uint32_t hidden = c.down.rows, slots = c.tokens * c.top_k;
  const int32_t* ids = call.at<const int32_t>(2, slots);
  const float* weights = call.at<const float>(3, uint64_t{c.tokens} * (c.top_k + 1));
  float* x = call.at<float>(10, uint64_t{c.tokens} * hidden);

  const uint64_t floats = input_floats(down.cols), shared_floats = input_floats(shared_down.cols);
  const uint32_t widest = down.cols > shared_down.cols ? down.cols : shared_down.cols;
  const GemvScratch scratch(call, worker, widest, slots * floats + c.tokens * shared_floats);
  float* const shared_inputs = scratch.inputs + slots * floats;
  if (worker.first_entry(call)) {
    const float* act = call.at<const float>(0, uint64_t{slots} * down.cols);
    const float* shared_act = call.at<const float>(1, uint64_t{c.tokens} * shared_down.cols);
    for (uint64_t slot = 0; slot < slots; ++slot)
      prepare_input(down, act + slot * down.cols, scratch.inputs + slot * floats);
    for (uint64_t token = 0; token < c.tokens; ++token)
      prepare_input(shared_down, shared_act + token * shared_down.cols, shared_inputs + token * shared_floats);
  }
  // Consecutive tasks of a token are taken together: an expert's rows are then read in longer runs.
  const uint32_t blocks = blocks_of(hidden);
  for (uint32_t task = begin; task < end;) {
    const uint32_t token = task / blocks, block = task % blocks;
    uint32_t run = kRunRows / kTaskRows;
    if (run > end - task) run = end - task;
    if (run > blocks - block) run = blocks - block;
    const uint32_t first = block * kTaskRows;
    const uint32_t rows = hidden - first < run * kTaskRows ? hidden - first : run * kTaskRows;
    const ExpertsOutRow row{call,
                            c,
                            down,
                            shared_down,
                            ids + token * c.top_k,
                            weights + token * (c.top_k + 1),
                            scratch.inputs + uint64_t{token} * c.top_k * floats,
                            shared_inputs + token * shared_floats,
                            scratch.scales};
    row.update(first, rows, x + uint64_t{token} * hidden);
    task += run;
  }
}

struct ExpertsGemvConstants {
  uint32_t slots;
  uint32_t choices;  // slots that share an input row
  MatrixShape matrix;
};

// The split form: y[slot] = matrix[ids[slot]] · x[slot / choices]. Buffers: x, ids, matrix (three), y.
void experts_gemv(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsGemvConstants>();
  const Matrix stack = bind_matrix(call, 2, c.matrix);
  const int32_t* ids = call.at<const int32_t>(1, c.slots);
  float* y = call.at<float>(5, uint64_t{c.slots} * stack.rows);
  const uint32_t inputs = c.slots / c.choices;
  const uint64_t floats = input_floats(stack.cols);
  const GemvScratch scratch(call, worker, stack.cols, inputs * floats);
  if (worker.first_entry(call)) {
    const float* x = call.at<const float>(0, uint64_t{inputs} * stack.cols);
    for (uint64_t i = 0; i < inputs; ++i) prepare_input(stack, x + i * stack.cols, scratch.inputs + i * floats);
  }
  const uint32_t blocks = blocks_of(stack.rows);
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t slot = task / blocks, block = task % blocks;
    const Matrix m = chosen(call, stack, c.matrix.experts, ids[slot]);
    float values[kTaskRows];
    multiply_block_rows(m, block, input_at(scratch.inputs + slot / c.choices * floats, m.cols), scratch.scales, values);
    const uint32_t row = block * kTaskRows;
    const uint32_t count = m.rows - row < kTaskRows ? m.rows - row : kTaskRows;
    std::memcpy(y + uint64_t{slot} * m.rows + row, values, count * sizeof(float));
  }
}

}  // namespace

extern const Kernel kExpertsGemvKernels[] = {
    {"experts_in_gemv", experts_in_gemv, 16, sizeof(ExpertsInConstants)},
    {"experts_out_gemv", experts_out_gemv, 11, sizeof(ExpertsOutConstants)},
    {"experts_gemv", experts_gemv, 6, sizeof(ExpertsGemvConstants)},
};
extern const uint32_t kExpertsGemvKernelCount = sizeof(kExpertsGemvKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
