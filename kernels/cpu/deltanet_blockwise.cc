// The blockwise deltanet.scan: a block of tokens at a time, in the WY form (Yang et al. 2024; model specification §6).
//
// With S the state at the block's start, g[t] the product of the decays up to token t and D[t, i] that of those after
// token i up to t, the changes Δ of the state solve the unit triangular system
//   Δ[t] + β[t] Σ_{i<t} D[t, i] (k̂[t]·k̂[i]) Δ[i] = β[t] (v[t] − g[t] S k̂[t]),
// and the outputs and the next state are matrix products. The state is held transposed (key × value).
#include <algorithm>

#include "abi.h"
#include "lanes.h"
#include "tile.h"

namespace lily::LILY_ISA {
namespace {

struct BlockwiseConstants {
  uint32_t rows;  // tokens
  uint32_t key_heads;
  uint32_t value_heads;
  uint32_t dim;    // of a head
  uint32_t parts;  // tasks a head, each with dim / parts value columns
  uint32_t block;  // tokens
};

constexpr uint32_t kTriangleRows = 12;  // rows of a triangle taken together; what lies left of them is a product

struct Block {
  const float *q, *k, *v, *decay, *beta;  // of the block's first token and this task's heads and columns
  float* o;
  int64_t key_row, value_row, scalar_row;  // floats between tokens
  uint32_t tokens;
};

// Worker scratch.
struct Workspace {
  float* state;   // [dim, columns]
  float* keys;    // [dim, block], k̂ transposed
  float* system;  // [block, block], minus the triangle's left side
  float* within;  // [block, block], D ∘ (q̂·k̂)
  float* delta;   // [block, columns]
  float* since;   // [block], g
  float* to_end;  // [block], D[last, i]
};

uint64_t align16(uint64_t n) { return (n + 15) / 16 * 16; }

Workspace workspace(const Call& call, const BlockwiseConstants& c, Worker& worker) {
  const uint64_t columns = c.dim / c.parts, square = align16(uint64_t{c.block} * c.block);
  const uint64_t sizes[] = {c.dim * columns, uint64_t{c.dim} * c.block, square, square, c.block * columns, c.block,
                            c.block};
  float* starts[7];
  uint64_t total = 0;
  for (int i = 0; i < 7; ++i) {
    starts[i] = worker.take<float>(call, total * sizeof(float), sizes[i]);
    total += align16(sizes[i]);
  }
  return {starts[0], starts[1], starts[2], starts[3], starts[4], starts[5], starts[6]};
}

// out[j, i] = in[i, j] for whole vectors of both; rows of `in` past `rows` count as zero.
void transpose_block(const float* in, int64_t in_row, uint32_t rows, uint32_t columns, float* out, int64_t out_row) {
  for (uint32_t i = 0; i < rows; i += kWidth)
    for (uint32_t j = 0; j < columns; j += kWidth) {
      VF square[kWidth];
      for (uint32_t r = 0; r < uint32_t{kWidth}; ++r) square[r] = i + r < rows ? load(in + (i + r) * in_row + j) : VF{};
      transpose(square);
      for (uint32_t r = 0; r < kWidth; ++r) store(out + (j + r) * out_row + i, square[r]);
    }
}

// The two triangles from the products of keys with keys and queries, and the decays.
void weigh(const Block& b, const Workspace& w, uint32_t block) {
  float* between = w.to_end;
  float since = 1.0f;
  for (uint32_t t = 0; t < b.tokens; ++t) {
    const float decay = b.decay[t * b.scalar_row], beta = b.beta[t * b.scalar_row];
    // Products, not differences of logarithms: a decay that underflowed to zero stays exact.
    for (uint32_t i = 0; i < t; ++i) between[i] *= decay;
    between[t] = 1.0f;
    w.since[t] = since *= decay;
    float *system = w.system + uint64_t{t} * block, *within = w.within + uint64_t{t} * block;
    for (uint32_t i = 0; i <= t; ++i) within[i] *= between[i];
    std::fill(within + t + 1, within + b.tokens, 0.0f);
    for (uint32_t i = 0; i < t; ++i) system[i] *= -beta * between[i];
  }
}

// x[t] += Σ_{i<t} system[t, i] x[i], in order of t.
void solve(const float* system, uint32_t block, float* x, uint32_t tokens, uint32_t columns) {
  for (uint32_t first = 0; first < tokens; first += kTriangleRows) {
    const uint32_t last = std::min(first + kTriangleRows, tokens);
    const Left left{system + uint64_t{first} * block, block, 1};
    if (first > 0)
      product(last - first, columns, first, left, row_major(x, columns), x + first * columns, columns, 1.0f);
    for (uint32_t t = first + 1; t < last; ++t)
      for (uint32_t n = 0; n < columns; n += kWidth) {
        VF sum = load(x + t * columns + n);
        for (uint32_t i = first; i < t; ++i)
          sum = fma(broadcast(system[t * block + i]), load(x + i * columns + n), sum);
        store(x + t * columns + n, sum);
      }
  }
}

void scale_row(float* x, float factor, uint32_t columns) {
  for (uint32_t n = 0; n < columns; n += kWidth) store(x + n, load(x + n) * factor);
}

void scan_block(const BlockwiseConstants& c, const Block& b, const Workspace& w) {
  const uint32_t columns = c.dim / c.parts, tokens = b.tokens;
  const uint32_t padded = (tokens + kWidth - 1) / kWidth * kWidth;
  const Left queries{b.q, b.key_row, 1}, keys{b.k, b.key_row, 1};
  const Right state = row_major(w.state, columns), turned = row_major(w.keys, c.block);

  transpose_block(b.k, b.key_row, tokens, c.dim, w.keys, c.block);
  product(tokens, padded, c.dim, keys, turned, w.system, c.block, 0.0f);
  product(tokens, padded, c.dim, queries, turned, w.within, c.block, 0.0f);
  weigh(b, w, c.block);

  product(tokens, columns, c.dim, keys, state, w.delta, columns, 0.0f);
  for (uint32_t t = 0; t < tokens; ++t) {
    float* row = w.delta + t * columns;
    const float beta = b.beta[t * b.scalar_row], since = w.since[t];
    for (uint32_t n = 0; n < columns; n += kWidth)
      store(row + n, (load(b.v + t * b.value_row + n) - load(row + n) * since) * beta);
  }
  solve(w.system, c.block, w.delta, tokens, columns);

  product(tokens, columns, c.dim, queries, state, b.o, b.value_row, 0.0f);
  for (uint32_t t = 0; t < tokens; ++t) scale_row(b.o + t * b.value_row, w.since[t], columns);
  for (uint32_t first = 0; first < tokens; first += kTriangleRows) {
    const uint32_t last = std::min(first + kTriangleRows, tokens);
    const Left within{w.within + uint64_t{first} * c.block, c.block, 1};
    product(last - first, columns, last, within, row_major(w.delta, columns), b.o + first * b.value_row, b.value_row,
            1.0f);
  }

  for (uint32_t t = 0; t < tokens; ++t) scale_row(w.delta + t * columns, w.to_end[t], columns);
  product(c.dim, columns, tokens, {w.keys, c.block, 1}, row_major(w.delta, columns), w.state, columns,
          w.since[tokens - 1]);
}

// 0 q, 1 k, 2 v, 3 decay, 4 beta, 5 state, 6 o. Task: (value head, part of its value columns), all tokens.
void scan(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<BlockwiseConstants>();
  const uint64_t key_row = uint64_t{c.key_heads} * c.dim, value_row = uint64_t{c.value_heads} * c.dim;
  const float* q = call.at<const float>(0, c.rows * key_row);
  const float* k = call.at<const float>(1, c.rows * key_row);
  const float* v = call.at<const float>(2, c.rows * value_row);
  const float* decay = call.at<const float>(3, uint64_t{c.rows} * c.value_heads);
  const float* beta = call.at<const float>(4, uint64_t{c.rows} * c.value_heads);
  float* states = call.at<float>(5, value_row * c.dim);
  float* o = call.at<float>(6, c.rows * value_row);
  const Workspace w = workspace(call, c, worker);
  const uint32_t columns = c.dim / c.parts;
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t head = task / c.parts, column = task % c.parts * columns;
    const uint64_t key = uint64_t{head / (c.value_heads / c.key_heads)} * c.dim,
                   value = uint64_t{head} * c.dim + column;
    float* state = states + (uint64_t{head} * c.dim + column) * c.dim;
    transpose_block(state, c.dim, columns, c.dim, w.state, columns);
    for (uint32_t t = 0; t < c.rows; t += c.block) {
      const uint64_t scalar = uint64_t{t} * c.value_heads + head;
      scan_block(c,
                 {q + t * key_row + key, k + t * key_row + key, v + t * value_row + value, decay + scalar,
                  beta + scalar, o + t * value_row + value, static_cast<int64_t>(key_row),
                  static_cast<int64_t>(value_row), c.value_heads, std::min(c.block, c.rows - t)},
                 w);
    }
    transpose_block(w.state, columns, c.dim, columns, state, c.dim);
  }
}

}  // namespace

extern const Kernel kDeltanetBlockwiseKernels[] = {{"deltanet_scan_blockwise", scan, 7, sizeof(BlockwiseConstants)}};
extern const uint32_t kDeltanetBlockwiseKernelCount = 1;

}  // namespace lily::LILY_ISA
