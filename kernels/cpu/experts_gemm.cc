// Experts of a chunk of token rows (model_spec §7): a product for each expert that was chosen, over the rows sorted by
// expert (moe.group). Each block of an expert's weights is dequantised once for up to kTokenBlock of its rows.
#include "gemm.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kPairRows = kBlockRows / 2;  // rows of the gate, and of the up projection, of a block

struct Rows {
  uint32_t first;
  uint32_t count;
};

// The sorted rows of an expert.
Rows rows_of(const Call& call, const int32_t* offsets, uint32_t expert, uint32_t slots) {
  const int32_t first = offsets[expert], last = offsets[expert + 1];
  if (first < 0 || first > last || static_cast<uint32_t>(last) > slots)
    fail(call.name, "was given offsets that do not ascend");
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(last - first)};
}

// order[i], a row and choice.
uint32_t slot_at(const Call& call, const int32_t* order, uint32_t i, uint32_t slots) {
  const auto slot = static_cast<uint32_t>(order[i]);
  if (slot >= slots) fail(call.name, "was given an order with a row that does not exist");
  return slot;
}

struct ExpertsInConstants {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t tile;
  uint32_t task_rows;    // outputs of a task
  uint32_t token_block;  // tokens of a task of the shared expert; of an expert, those packed at a time
  uint32_t reserved;
  MatrixShape gate, up, shared_gate, shared_up;
};

bool same_layout(const Matrix& a, const Matrix& b) { return codes_of(a.format) == codes_of(b.format); }

// act = silu(gate · x) · (up · x) for some outputs and tokens of one expert.
struct GatedProduct {
  const ExpertsInConstants& c;
  const GemmScratch& scratch;
  const Matrix& gate;
  const Matrix& up;

  // Tokens row_of(0) .. row_of(tokens - 1), outputs first .. end, into act[token][output].
  template <class RowOf>
  void run(uint32_t tokens, uint32_t first, uint32_t end, RowOf&& row_of, float* act) const {
    for (uint32_t t = 0; t < tokens; t += c.token_block) {
      const uint32_t some = tokens - t < c.token_block ? tokens - t : c.token_block;
      const auto row = [&](uint32_t i) { return row_of(t + i); };
      const Panels x = pack_panels(some, c.tile, gate.cols, codes_of(gate.format), scratch.rest, row);
      float* const other = scratch.rest + uint64_t{c.token_block} * padded_depth(gate.cols);
      const Panels up_x =
          same_layout(gate, up) ? x : pack_panels(some, c.tile, up.cols, codes_of(up.format), other, row);
      for (uint32_t r = first; r < end; r += kPairRows) {
        const uint32_t rows = end - r < kPairRows ? end - r : kPairRows;
        float* const up_sums = scratch.sums + kPairRows * kSumStride;
        multiply_rows(gate, r, rows, x, 0, some, scratch.weights, scratch.sums);
        multiply_rows(up, r, rows, up_x, 0, some, scratch.weights, up_sums);
        activate(scratch.sums, up_sums, rows, some);
        write_sums(scratch.sums, rows, some, act + uint64_t{t} * gate.rows + r, gate.rows, false);
      }
    }
  }

  static void activate(float* sums, const float* up_sums, uint32_t rows, uint32_t tokens) {
    for (uint64_t r = 0; r < rows; ++r)
      for (uint64_t i = r * kSumStride; i < r * kSumStride + tokens; i += kWidth)
        store(sums + i, silu(load(sums + i)) * load(up_sums + i));
  }
};

// Buffers: h, offsets, order, gate, up, shared gate, shared up (three each), act, shared act. Tasks are runs of outputs
// of each expert, then of each block of tokens of the shared expert.
void experts_in_grouped(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsInConstants>();
  const Matrix gate = bind_matrix(call, 3, c.gate), up = bind_matrix(call, 6, c.up);
  const Matrix shared_gate = bind_matrix(call, 9, c.shared_gate), shared_up = bind_matrix(call, 12, c.shared_up);
  const uint32_t hidden = gate.cols, width = gate.rows, slots = c.tokens * c.top_k;
  if (c.token_block > kTokenBlock || c.token_block % c.tile != 0) fail(call.name, "cannot pack that many tokens");
  const float* h = call.at<const float>(0, uint64_t{c.tokens} * hidden);
  const int32_t* offsets = call.at<const int32_t>(1, uint64_t{c.gate.experts} + 1);
  const int32_t* order = call.at<const int32_t>(2, slots);
  float* act = call.at<float>(15, uint64_t{slots} * width);
  float* shared_act = call.at<float>(16, uint64_t{c.tokens} * shared_gate.rows);
  const bool one_layout = same_layout(gate, up) && same_layout(shared_gate, shared_up);
  const GemmScratch scratch(call, worker, (one_layout ? 1 : 2) * uint64_t{c.token_block} * padded_depth(hidden));

  const auto last_row = [&](uint32_t first, uint32_t rows) {
    return first + c.task_rows < rows ? first + c.task_rows : rows;
  };
  const uint32_t runs = (width + c.task_rows - 1) / c.task_rows;
  const uint32_t shared_runs = (shared_gate.rows + c.task_rows - 1) / c.task_rows;
  for (uint32_t task = begin; task < end; ++task) {
    if (task < c.gate.experts * runs) {
      const uint32_t expert = task / runs, first = task % runs * c.task_rows;
      const Rows rows = rows_of(call, offsets, expert, slots);
      const Matrix gate_e = gate.expert(expert), up_e = up.expert(expert);
      const auto row_of = [&](uint32_t i) {
        return h + uint64_t{slot_at(call, order, rows.first + i, slots) / c.top_k} * hidden;
      };
      GatedProduct{c, scratch, gate_e, up_e}.run(rows.count, first, last_row(first, width), row_of,
                                                 act + uint64_t{rows.first} * width);
    } else {
      const uint32_t index = task - c.gate.experts * runs;
      const uint32_t token = index / shared_runs * c.token_block, first = index % shared_runs * c.task_rows;
      const uint32_t tokens = c.tokens - token < c.token_block ? c.tokens - token : c.token_block;
      const auto row_of = [&](uint32_t i) { return h + uint64_t{token + i} * hidden; };
      GatedProduct{c, scratch, shared_gate, shared_up}.run(tokens, first, last_row(first, shared_gate.rows), row_of,
                                                           shared_act + uint64_t{token} * shared_gate.rows);
    }
  }
}

struct ExpertsGroupedConstants {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t tile;
  uint32_t task_rows;
  uint32_t token_block;
  uint32_t gather;  // 1: x has a row a token, found through `order`; 0: x is sorted
  MatrixShape matrix;
};

// The split form: y[i] = matrix of sorted row i's expert · its x. Buffers: x, offsets, order, matrix (three), y.
void experts_grouped(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsGroupedConstants>();
  const Matrix stack = bind_matrix(call, 3, c.matrix);
  const uint32_t cols = stack.cols, slots = c.tokens * c.top_k;
  if (c.token_block > kTokenBlock || c.token_block % c.tile != 0) fail(call.name, "cannot pack that many tokens");
  const float* x = call.at<const float>(0, uint64_t{c.gather ? c.tokens : slots} * cols);
  const int32_t* offsets = call.at<const int32_t>(1, uint64_t{c.matrix.experts} + 1);
  const int32_t* order = c.gather ? call.at<const int32_t>(2, slots) : nullptr;
  float* y = call.at<float>(6, uint64_t{slots} * stack.rows);
  const GemmScratch scratch(call, worker, uint64_t{c.token_block} * padded_depth(cols));
  const uint32_t runs = (stack.rows + c.task_rows - 1) / c.task_rows;
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t expert = task / runs, first = task % runs * c.task_rows;
    const uint32_t last = first + c.task_rows < stack.rows ? first + c.task_rows : stack.rows;
    const Rows rows = rows_of(call, offsets, expert, slots);
    const Matrix m = stack.expert(expert);
    for (uint32_t t = 0; t < rows.count; t += c.token_block) {
      const uint32_t some = rows.count - t < c.token_block ? rows.count - t : c.token_block;
      const Panels panels = pack_panels(some, c.tile, cols, codes_of(m.format), scratch.rest, [&](uint32_t i) {
        const uint32_t row = rows.first + t + i;
        return x + uint64_t{order != nullptr ? slot_at(call, order, row, slots) / c.top_k : row} * cols;
      });
      for (uint32_t r = first; r < last; r += kBlockRows) {
        const uint32_t count = last - r < kBlockRows ? last - r : kBlockRows;
        multiply_rows(m, r, count, panels, 0, some, scratch.weights, scratch.sums);
        write_sums(scratch.sums, count, some, y + uint64_t{rows.first + t} * m.rows + r, m.rows, false);
      }
    }
  }
}

struct ExpertsOutConstants {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t tile;
  uint32_t block_rows;    // outputs of a task
  uint64_t panel_floats;  // of the routed experts' panels; those of the shared expert follow
  MatrixShape down, shared_down;
};

// Where an expert's panels begin: each expert before it takes whole vectors of rows.
uint64_t panels_before(const Call& call, const int32_t* offsets, uint32_t expert, uint32_t slots, uint32_t depth) {
  uint64_t rows = 0;
  for (uint32_t e = 0; e < expert; ++e) rows += round_up(rows_of(call, offsets, e, slots).count, kWidth);
  return rows * depth;
}

// Buffers: act, shared act, offsets, inverse, panels, order. A task packs the rows of one expert; then come the tiles
// of the shared expert, and last one task that turns `inverse` around, as sums are added to x from sorted rows.
void experts_out_pack(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<ExpertsOutConstants>();
  const uint32_t slots = c.tokens * c.top_k, cols = c.down.cols, shared_cols = c.shared_down.cols;
  const float* act = call.at<const float>(0, uint64_t{slots} * cols);
  const float* shared_act = call.at<const float>(1, uint64_t{c.tokens} * shared_cols);
  const int32_t* offsets = call.at<const int32_t>(2, uint64_t{c.down.experts} + 1);
  const int32_t* inverse = call.at<const int32_t>(3, slots);
  const uint32_t codes = codes_of(static_cast<Format>(c.down.format));
  const uint32_t shared_codes = codes_of(static_cast<Format>(c.shared_down.format));
  const uint32_t shared_depth = depth_of(shared_cols, shared_codes);
  float* panels = call.at<float>(4, c.panel_floats + uint64_t{round_up(c.tokens, kWidth)} * shared_depth);
  int32_t* order = call.at<int32_t>(5, slots);
  const uint32_t shared_tiles = (c.tokens + c.tile - 1) / c.tile;
  for (uint32_t task = begin; task < end; ++task) {
    if (task < c.down.experts) {
      const Rows rows = rows_of(call, offsets, task, slots);
      if (rows.count == 0) continue;
      const uint64_t at = panels_before(call, offsets, task, slots, depth_of(cols, codes));
      if (at + uint64_t{round_up(rows.count, kWidth)} * depth_of(cols, codes) > c.panel_floats)
        fail(call.name, "needs more room for panels than it was given");
      const float* first = act + uint64_t{rows.first} * cols;
      pack_panels(rows.count, c.tile, cols, codes, panels + at, [&](uint32_t i) { return first + uint64_t{i} * cols; });
    } else if (task < c.down.experts + shared_tiles) {
      const uint32_t first = (task - c.down.experts) * c.tile;
      const uint32_t count = c.tokens - first < c.tile ? c.tokens - first : c.tile;
      pack_panels(count, c.tile, shared_cols, shared_codes, panels + c.panel_floats + uint64_t{first} * shared_depth,
                  [&](uint32_t i) { return shared_act + uint64_t{first + i} * shared_cols; });
    } else {
      for (uint32_t slot = 0; slot < slots; ++slot) {
        const auto row = static_cast<uint32_t>(inverse[slot]);
        if (row >= slots) fail(call.name, "was given a sorted row that does not exist");
        order[row] = static_cast<int32_t>(slot);
      }
    }
  }
}

// Buffers: panels, order, offsets, weights, down, shared down (three each), x. A task is a block of outputs: it alone
// adds to these columns of x, first expert by expert, then the shared one.
void experts_out_grouped(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<ExpertsOutConstants>();
  const Matrix down = bind_matrix(call, 4, c.down), shared_down = bind_matrix(call, 7, c.shared_down);
  const uint32_t slots = c.tokens * c.top_k, hidden = down.rows;
  if (c.block_rows > kBlockRows) fail(call.name, "cannot hold a block of that many rows");
  const uint32_t depth = depth_of(down.cols, codes_of(down.format));
  const uint32_t shared_depth = depth_of(shared_down.cols, codes_of(shared_down.format));
  const float* panels = call.at<const float>(0, c.panel_floats + uint64_t{round_up(c.tokens, kWidth)} * shared_depth);
  const int32_t* order = call.at<const int32_t>(1, slots);
  const int32_t* offsets = call.at<const int32_t>(2, uint64_t{c.down.experts} + 1);
  const float* weights = call.at<const float>(3, uint64_t{c.tokens} * (c.top_k + 1));
  float* x = call.at<float>(10, uint64_t{c.tokens} * hidden);
  const GemmScratch scratch(call, worker);

  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t row = task * c.block_rows;
    const uint32_t rows = hidden - row < c.block_rows ? hidden - row : c.block_rows;
    // target(i) is token and weight of the i-th row of the panels.
    const auto add = [&](const Matrix& m, const Panels& panel, auto&& target) {
      for (uint32_t t = 0; t < panel.tokens; t += kTokenBlock) {
        const uint32_t some = panel.tokens - t < kTokenBlock ? panel.tokens - t : kTokenBlock;
        multiply_rows(m, row, rows, panel, t, some, scratch.weights, scratch.sums);
        for_each_token(scratch.sums, rows, some, [&](uint32_t i, uint32_t r, VF values, uint32_t count) {
          const auto [token, weight] = target(t + i);
          float* out = x + uint64_t{token} * hidden + row + r;
          if (count == kWidth) {
            store(out, fma(broadcast(weight), values, load(out)));
          } else {
            for (uint32_t j = 0; j < count; ++j) out[j] += weight * values[j];
          }
        });
      }
    };
    struct Target {
      uint32_t token;
      float weight;
    };
    uint64_t at = 0;
    for (uint32_t expert = 0; expert < c.down.experts; ++expert) {
      const Rows sorted = rows_of(call, offsets, expert, slots);
      add(down.expert(expert), Panels{panels + at, sorted.count, c.tile, depth}, [&](uint32_t i) {
        const uint32_t slot = slot_at(call, order, sorted.first + i, slots);
        const uint32_t token = slot / c.top_k;
        return Target{token, weights[uint64_t{token} * (c.top_k + 1) + slot % c.top_k]};
      });
      at += uint64_t{round_up(sorted.count, kWidth)} * depth;
    }
    add(shared_down, Panels{panels + c.panel_floats, c.tokens, c.tile, shared_depth},
        [&](uint32_t i) { return Target{i, weights[uint64_t{i} * (c.top_k + 1) + c.top_k]}; });
  }
}

}  // namespace

extern const Kernel kExpertsGemmKernels[] = {
    {"experts_in_grouped", experts_in_grouped, 17, sizeof(ExpertsInConstants)},
    {"experts_grouped", experts_grouped, 7, sizeof(ExpertsGroupedConstants)},
    {"experts_out_pack", experts_out_pack, 6, sizeof(ExpertsOutConstants)},
    {"experts_out_grouped", experts_out_grouped, 11, sizeof(ExpertsOutConstants)},
};
extern const uint32_t kExpertsGemmKernelCount = sizeof(kExpertsGemmKernels) / sizeof(Kernel);

}  // namespace lily::LILY_ISA
