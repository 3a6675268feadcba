// moe.route: RMS norm, router scores, the choice of experts and their weights, the shared expert's gate (model_spec
// §7).
#include "gemv.h"
#include "rms_norm.h"
#include "route_select.h"

namespace lily::LILY_ISA {
namespace {

constexpr uint32_t kTaskRows = 16;   // experts a task of route_scores looks at
constexpr uint32_t kTaskTokens = 8;  // and token rows

struct RouteConstants {
  uint32_t rows;
  uint32_t hidden;
  float eps;
  uint32_t reserved;
  MatrixShape gate;
  MatrixShape shared;  // `input` numbers the distinct prepared inputs
};

struct Router {
  const float* x;
  const float* norm;
  Matrix gate;
  Matrix shared;
  float* h;

  // Buffers: x, norm, gate, shared gate (three each), h.
  Router(const Call& call, const RouteConstants& c)
      : x(call.at<const float>(0, uint64_t{c.rows} * c.hidden)),
        norm(call.at<const float>(1, c.hidden)),
        gate(bind_matrix(call, 2, c.gate)),
        shared(bind_matrix(call, 5, c.shared)),
        h(call.at<float>(8, uint64_t{c.rows} * c.hidden)) {}
};

// What a thread keeps between the tasks of route_scores that share token rows.
struct Prepared {
  uint32_t* tokens;  // first of the token rows that are prepared
  float* row;
  float* scales;
  float* inputs;  // [distinct forms][kTaskTokens] prepared rows

  static constexpr uint64_t kHeader = 64;

  Prepared(const Call& call, const RouteConstants& c, Worker& worker) {
    const uint64_t scale_floats = uint64_t{kQuad} * padded_groups(c.hidden), row_floats = padded_cols(c.hidden);
    tokens = worker.take<uint32_t>(call, 0, 1);
    if (worker.first_entry(call)) *tokens = UINT32_MAX;
    row = worker.take<float>(call, kHeader, row_floats + scale_floats + (c.shared.input + 1) * form_floats(c));
    scales = row + row_floats;
    inputs = scales + scale_floats;
  }
  static uint64_t form_floats(const RouteConstants& c) { return uint64_t{kTaskTokens} * input_floats(c.hidden); }
  Input input(const RouteConstants& c, uint32_t form) const {
    return input_at(inputs + form * form_floats(c), c.hidden);
  }
};

void prepare(const Router& r, const RouteConstants& c, uint32_t first, uint32_t count, const Prepared& p) {
  if (*p.tokens == first) return;
  *p.tokens = first;
  for (uint32_t t = 0; t < count; ++t) {
    rms_norm(r.x + uint64_t{first + t} * c.hidden, r.norm, c.hidden, c.eps, p.row);
    const uint64_t at = uint64_t{t} * input_floats(c.hidden);
    prepare_input(r.gate, p.row, p.inputs + at);
    if (c.shared.input != c.gate.input) prepare_input(r.shared, p.row, p.inputs + Prepared::form_floats(c) + at);
  }
}

// Buffers of Router, 9 scores, 10 shared scores. Task: (token rows, experts); the first one of its rows also writes h
// and the shared expert's score.
void route_scores(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<RouteConstants>();
  const Router r(call, c);
  const uint32_t experts = r.gate.rows, blocks = (experts + kTaskRows - 1) / kTaskRows;
  float* scores = call.at<float>(9, uint64_t{c.rows} * experts);
  float* shared = call.at<float>(10, c.rows);
  const Prepared p(call, c, worker);
  for (uint32_t task = begin; task < end; ++task) {
    const uint32_t first = task / blocks * kTaskTokens, count = std::min(kTaskTokens, c.rows - first);
    const uint32_t row = task % blocks * kTaskRows;
    prepare(r, c, first, count, p);
    const auto keep = [&](uint32_t token, uint32_t expert, const float* values, uint32_t n) {
      std::memcpy(scores + uint64_t{first + token} * experts + expert, values, n * sizeof(float));
    };
    project(r.gate, row, std::min(row + kTaskRows, experts), p.input(c, c.gate.input), count, p.scales, keep);
    if (row > 0) continue;
    project(r.shared, 0, 1, p.input(c, c.shared.input), count, p.scales,
            [&](uint32_t token, uint32_t, const float* values, uint32_t) { shared[first + token] = values[0]; });
    for (uint64_t t = first; t < first + count; ++t)
      rms_norm(r.x + t * c.hidden, r.norm, c.hidden, c.eps, r.h + t * c.hidden);
  }
}

struct SelectConstants {
  uint32_t rows;
  uint32_t experts;
  uint32_t top_k;
  uint32_t reserved;
};

// 0 scores, 1 shared scores, 2 ids, 3 weights. Task: one row.
void route_select(const Call& call, uint32_t begin, uint32_t end, Worker& worker) {
  const auto& c = call.constants<SelectConstants>();
  if (c.top_k > kMaxTopK || c.top_k > c.experts)
    fail(call.name, "was asked for more experts a token than it can choose");
  const float* scores = call.at<const float>(0, uint64_t{c.rows} * c.experts);
  const float* shared = call.at<const float>(1, c.rows);
  int32_t* ids = call.at<int32_t>(2, uint64_t{c.rows} * c.top_k);
  float* weights = call.at<float>(3, uint64_t{c.rows} * (c.top_k + 1));
  float* work = worker.take<float>(call, 0, choice_floats(c.experts));
  for (uint64_t t = begin; t < end; ++t)
    choose_experts(scores + t * c.experts, shared[t], c.experts, c.top_k, work, ids + t * c.top_k,
                   weights + t * (c.top_k + 1));
}

}  // namespace

extern const Kernel kRouteKernels[] = {
    {"route_scores", route_scores, 11, sizeof(RouteConstants)},
    {"route_select", route_select, 4, sizeof(SelectConstants)},
};
extern const uint32_t kRouteKernelCount = 2;

}  // namespace lily::LILY_ISA
