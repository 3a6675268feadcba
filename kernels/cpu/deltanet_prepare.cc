// deltanet.prepare: causal convolution and SiLU, l2 norm of q and k, decay and beta (model specification §6, 2 to 4).
#include <algorithm>

#include "abi.h"
#include "lane_sums.h"

namespace lily::LILY_ISA {
namespace {

struct PrepareConstants {
  uint32_t rows;
  uint32_t key_heads;
  uint32_t value_heads;
  uint32_t dim;  // of a head
};

constexpr uint32_t kTaps = 4;
constexpr uint32_t kHistory = kTaps - 1;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kHeadsAtOnce = 8;  // heads whose taps are held: neighbours in memory are walked together, row by row
constexpr uint32_t kRowBlock = 16;
constexpr float kNormEps = 1e-6f;  // a constant of the architecture, not rms_norm_eps

struct Operands {
  const float *qkv, *a, *b, *weight, *a_log, *dt_bias;
  float *state, *q, *k, *v, *decay, *beta;
  uint64_t channels;
};

// Row t of the input as the convolution sees it: three rows of history stand before row 0.
const float* input_row(const Operands& p, int64_t t) {
  return t >= 0 ? p.qkv + t * static_cast<int64_t>(p.channels)
                : p.state + (t + kHistory) * static_cast<int64_t>(p.channels);
}

void split_taps(const float* weight, uint32_t dim, float* taps) {
  for (uint32_t i = 0; i < dim; i += kWidth) {
    VF tap[kTaps];
    deinterleave4(weight + i * kTaps, tap);
    for (uint32_t j = 0; j < kTaps; ++j) store(taps + j * dim + i, tap[j]);
  }
}

// out = silu(convolution) of one head's channels at row t; the sum of squares of what was written.
float convolve(const Operands& p, int64_t t, uint64_t channel, uint32_t dim, const float* taps, float* out) {
  const float* rows[kTaps];
  for (uint32_t j = 0; j < kTaps; ++j) rows[j] = input_row(p, t - kHistory + j) + channel;
  VF squares{};
  for (uint32_t i = 0; i < dim; i += kWidth) {
    VF sum = load(rows[0] + i) * load(taps + i);
    for (uint32_t j = 1; j < kTaps; ++j) sum = fma(load(rows[j] + i), load(taps + j * dim + i), sum);
    const VF value = silu(sum);
    squares = fma(value, value, squares);
    store(out + i, value);
  }
  return hsum(squares);
}

void scale(float* x, uint32_t dim, float factor) {
  for (uint32_t i = 0; i < dim; i += kWidth) store(x + i, load(x + i) * factor);
}

void prepare_head_row(const Operands& p, const PrepareConstants& c, uint32_t head, uint32_t t, const float* taps) {
  const uint64_t channel = uint64_t{head} * c.dim, key_width = uint64_t{c.key_heads} * c.dim;
  if (head >= 2 * c.key_heads) {
    convolve(p, t, channel, c.dim, taps, p.v + (uint64_t{t} * c.value_heads + head - 2 * c.key_heads) * c.dim);
    return;
  }
  const bool query = head < c.key_heads;
  float* out = (query ? p.q : p.k) + t * key_width + channel - (query ? 0 : key_width);
  const float norm = 1.0f / std::sqrt(convolve(p, t, channel, c.dim, taps, out) + kNormEps);
  scale(out, c.dim, query ? norm / std::sqrt(static_cast<float>(c.dim)) : norm);
}

// The last three rows of history ++ input.
void keep_history(const Operands& p, uint32_t rows, uint64_t channel, uint32_t dim) {
  for (uint32_t j = 0; j < kHistory; ++j) {
    const float* from = input_row(p, static_cast<int64_t>(rows) - kHistory + j) + channel;
    std::copy(from, from + dim, p.state + j * p.channels + channel);
  }
}

// ln(1 + e^x) = max(x, 0) + ln(1 + u) with u = e^-|x|, and ln(1 + u) = 2 artanh(u / (2 + u)): the argument is at most
// 1/3, where the series to its 15th power is exact to float.
VF softplus(VF x) {
  const VF u = exp(min(x, -x));
  const VF s = u / (u + 2.0f), square = s * s;
  VF series = broadcast(1.0f / 15);
  for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
    series = fma(series, square, broadcast(term));
  return max(x, VF{}) + 2.0f * s * series;
}

// Decay and beta of value heads [first, last) in every row.
void gates(const Operands& p, const PrepareConstants& c, uint32_t first, uint32_t last) {
  for (uint32_t head = first; head < last; head += kWidth) {
    const int64_t n = std::min<int64_t>(kWidth, last - head);
    const VF rate = exp(load_part(p.a_log + head, n)), bias = load_part(p.dt_bias + head, n);
    for (uint32_t t = 0; t < c.rows; ++t) {
      const uint64_t at = uint64_t{t} * c.value_heads + head;
      store_part(p.decay + at, exp(-rate * softplus(load_part(p.a + at, n) + bias)), n);
      store_part(p.beta + at, sigmoid(load_part(p.b + at, n)), n);
    }
  }
}

void prepare_heads(const Operands& p, const PrepareConstants& c, uint32_t first, uint32_t last) {
  alignas(64) float taps[kHeadsAtOnce * kTaps * kMaxDim];
  const uint32_t tap_floats = kTaps * c.dim;
  for (uint32_t head = first; head < last; ++head)
    split_taps(p.weight + uint64_t{head} * tap_floats, c.dim, taps + (head - first) * tap_floats);
  for (uint32_t block = 0; block < c.rows; block += kRowBlock)
    for (uint32_t head = first; head < last; ++head)
      for (uint32_t t = block; t < std::min(block + kRowBlock, c.rows); ++t)
        prepare_head_row(p, c, head, t, taps + (head - first) * tap_floats);
  keep_history(p, c.rows, uint64_t{first} * c.dim, (last - first) * c.dim);
  const uint32_t values = 2 * c.key_heads;
  if (last > values) gates(p, c, std::max(first, values) - values, last - values);
}

// 0 qkv, 1 a, 2 b, 3 conv_state, 4 conv_weight, 5 A_log, 6 dt_bias, 7 q, 8 k, 9 v, 10 decay, 11 beta.
// Task: one head of q, k or v, in the order of the channels. It alone touches its columns of conv_state.
void prepare(const Call& call, uint32_t begin, uint32_t end, Worker&) {
  const auto& c = call.constants<PrepareConstants>();
  if (c.dim > kMaxDim) fail(call.name, "was given a larger head than it supports");
  const uint64_t keys = uint64_t{c.key_heads} * c.dim, values = uint64_t{c.value_heads} * c.dim;
  const uint64_t channels = 2 * keys + values, scalars = uint64_t{c.rows} * c.value_heads;
  const Operands p{call.at<const float>(0, c.rows * channels),
                   call.at<const float>(1, scalars),
                   call.at<const float>(2, scalars),
                   call.at<const float>(4, channels * kTaps),
                   call.at<const float>(5, c.value_heads),
                   call.at<const float>(6, c.value_heads),
                   call.at<float>(3, channels * kHistory),
                   call.at<float>(7, c.rows * keys),
                   call.at<float>(8, c.rows * keys),
                   call.at<float>(9, c.rows * values),
                   call.at<float>(10, scalars),
                   call.at<float>(11, scalars),
                   channels};
  for (uint32_t head = begin; head < end; head += kHeadsAtOnce)
    prepare_heads(p, c, head, std::min(head + kHeadsAtOnce, end));
}

}  // namespace

extern const Kernel kDeltanetPrepareKernels[] = {{"deltanet_prepare", prepare, 12, sizeof(PrepareConstants)}};
extern const uint32_t kDeltanetPrepareKernelCount = 1;

}  // namespace lily::LILY_ISA
