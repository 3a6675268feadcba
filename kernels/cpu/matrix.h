// Weight matrices as checkpoints store them, and the readers of one block of a row.
//
// A matrix is [experts][rows][cols] with rows as outputs (y = x·Wᵀ). q4 and q8 hold affine codes, low bits first, in
// 32-bit words, with one scale and one bias a group of 32, 64 or 128 columns: w = scale·code + bias (model_spec §3).
// The file's bytes are used where they lie, so every load here may be unaligned.
#pragma once

#include "abi.h"
#include "lanes.h"
#include "simd.h"

#if defined(__F16C__) && !defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lily::LILY_ISA {

enum Format : uint32_t { kQ4 = 0, kQ8 = 1, kBf16 = 2, kF16 = 3, kF32 = 4 };

constexpr uint32_t kMinGroup = 32;

constexpr uint32_t round_up(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

constexpr bool is_quantized(Format format) { return format == kQ4 || format == kQ8; }

// A matrix's description among a dispatch's constants, as lily_builtin/cpu_matrix.py packs it.
struct MatrixShape {
  uint32_t rows;
  uint32_t cols;
  uint32_t experts;
  uint32_t format;
  uint32_t group_size;
  uint32_t wide_scales;  // 1: scales and biases are float32 instead of bfloat16
  uint32_t input;        // which prepared form of the input it multiplies, see gemv.h
  uint32_t reserved;
  uint64_t weight_stride;  // bytes between experts
  uint64_t scale_stride;
};

struct Matrix {
  const uint8_t* weight;
  const uint8_t* scales;
  const uint8_t* biases;
  Format format;
  uint32_t rows;
  uint32_t cols;
  uint32_t group_size;
  uint32_t groups;  // of a row
  bool wide_scales;
  uint64_t row_bytes;
  uint64_t scale_row_bytes;
  uint64_t weight_stride;
  uint64_t scale_stride;

  const uint8_t* weight_row(uint32_t row) const { return weight + row * row_bytes; }
  const uint8_t* scale_row(uint32_t row) const { return scales + row * scale_row_bytes; }
  const uint8_t* bias_row(uint32_t row) const { return biases + row * scale_row_bytes; }

  Matrix expert(uint32_t index) const {
    Matrix one = *this;
    one.weight += index * weight_stride;
    if (groups != 0) {
      one.scales += index * scale_stride;
      one.biases += index * scale_stride;
    }
    return one;
  }
};

constexpr uint32_t bits_of(Format format) { return format == kQ4 ? 4 : format == kQ8 ? 8 : format == kF32 ? 32 : 16; }

// The matrix bound at arguments `first`, `first + 1` (scales) and `first + 2` (biases).
inline Matrix bind_matrix(const Call& call, uint32_t first, const MatrixShape& shape) {
  Matrix m{};
  m.format = static_cast<Format>(shape.format);
  m.rows = shape.rows;
  m.cols = shape.cols;
  m.weight_stride = shape.weight_stride;
  m.scale_stride = shape.scale_stride;
  m.row_bytes = uint64_t{shape.cols} * bits_of(m.format) / 8;
  const uint64_t before = shape.experts - 1;
  m.weight = call.at<const uint8_t>(first, before * m.weight_stride + m.rows * m.row_bytes);
  if (is_quantized(m.format)) {
    const uint32_t size = shape.group_size;
    if (size < kMinGroup || (size & (size - 1)) != 0 || shape.cols % size != 0)
      fail(call.name, "needs groups of 32, 64 or 128 that divide the columns");
    m.group_size = shape.group_size;
    m.groups = shape.cols / shape.group_size;
    m.wide_scales = shape.wide_scales != 0;
    m.scale_row_bytes = uint64_t{m.groups} * (m.wide_scales ? 4 : 2);
    const uint64_t bytes = before * m.scale_stride + m.rows * m.scale_row_bytes;
    m.scales = call.at<const uint8_t>(first + 1, bytes);
    m.biases = call.at<const uint8_t>(first + 2, bytes);
  }
  return m;
}

// How the weights of one vector load are taken apart: lane l of `Raw` holds `kCodes` consecutive columns.
//   code<I>(raw)    column I of each lane as stored
//   shifted<I>(raw) the same times shift(I), which spares the shift: the inverse goes into the prepared input
template <Format F>
struct Codec;

template <uint32_t kBits>
struct AffineCodec {
  using Raw = VU;
  static constexpr int kCodes = 32 / kBits;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  static constexpr float shift(int i) { return i == kCodes - 1 ? 1.0f : static_cast<float>(1u << (kBits * i)); }

  template <int I>
  [[gnu::always_inline]] static VF code(Raw words) {
    return to_float((VI)((words >> (kBits * I)) & kMask));
  }
  template <int I>
  [[gnu::always_inline]] static VF shifted(Raw words) {
    // The top code would turn the word negative: it is shifted down after all, and needs no mask.
    if constexpr (I == kCodes - 1) return to_float((VI)(words >> (kBits * I)));
    return to_float((VI)(words & (kMask << (kBits * I))));
  }
};
template <>
struct Codec<kQ4> : AffineCodec<4> {};
template <>
struct Codec<kQ8> : AffineCodec<8> {};

template <class RawVector>
struct PlainCodec {
  using Raw = RawVector;
  static constexpr int kCodes = 1;
  static constexpr float shift(int) { return 1.0f; }
};
template <>
struct Codec<kBf16> : PlainCodec<VH> {
  template <int I>
  [[gnu::always_inline]] static VF code(Raw half) {
#if LILY_WIDTH == 8 && defined(__AVX2__)  // the compiler would widen in two halves
    return bits_to_float((VU)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#else
    return bits_to_float(__builtin_convertvector(half, VU) << 16);
#endif
  }
  template <int I>
  [[gnu::always_inline]] static VF shifted(Raw half) {
    return code<0>(half);
  }
};
template <>
struct Codec<kF16> : PlainCodec<VH> {
  template <int I>
  [[gnu::always_inline]] static VF code(Raw half) {
#if LILY_WIDTH == 8 && defined(__F16C__)
    return (VF)_mm256_cvtph_ps((__m128i)half);
#elif LILY_WIDTH == 16 && defined(__AVX512F__)
    return (VF)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);  // unmasked, GCC 12 warns of its own header
#elif LILY_WIDTH == 4 && defined(__aarch64__)
    return (VF)vcvt_f32_f16((float16x4_t)half);
#else
    // The exponent moves by 112; infinity and NaN (exponent 31) move once more. Subnormals come from their integer,
    // as threads may take subnormal floats for zeros.
    const VU wide = __builtin_convertvector(half, VU);
    const VU exponent = wide & 0x7c00u;
    const VU magnitude = (wide & 0x7fffu) << 13;
    const VF normal = bits_to_float(exponent == 0x7c00u ? magnitude | 0x7f800000u : magnitude + (112u << 23));
    const VF subnormal = to_float((VI)(wide & 0x3ffu)) * 0x1p-24f;
    const VF chosen = exponent == 0u ? subnormal : normal;
    VU bits;
    std::memcpy(&bits, &chosen, sizeof bits);
    return bits_to_float(bits | ((wide & 0x8000u) << 16));
#endif
  }
  template <int I>
  [[gnu::always_inline]] static VF shifted(Raw half) {
    return code<0>(half);
  }
};
template <>
struct Codec<kF32> : PlainCodec<VF> {
  template <int I>
  [[gnu::always_inline]] static VF code(Raw value) {
    return value;
  }
  template <int I>
  [[gnu::always_inline]] static VF shifted(Raw value) {
    return value;
  }
};

// Columns a block of one load has, and its bytes.
template <Format F>
constexpr uint32_t kBlock = Codec<F>::kCodes * kWidth;
template <Format F>
constexpr uint32_t kBlockBytes = sizeof(typename Codec<F>::Raw);
constexpr uint32_t kMaxBlock = 128;  // over all formats and widths: what buffers are padded to

template <Format F>
LILY_INLINE typename Codec<F>::Raw load_block(const uint8_t* p) {
  typename Codec<F>::Raw raw;
  std::memcpy(&raw, p, sizeof raw);
  return raw;
}
template <Format F>
LILY_INLINE typename Codec<F>::Raw load_block(const uint8_t* p, uint64_t bytes) {  // the rest is zero
  typename Codec<F>::Raw raw{};
  std::memcpy(&raw, p, bytes);
  return raw;
}

// Calls f.operator()<F, S>() for the matrix's format; a block of one load touches S groups (1 if unquantized).
template <Format F, class Function>
LILY_INLINE void visit_span(uint32_t group_size, Function&& f) {
  if constexpr (kBlock<F> / kMinGroup >= 4) {
    if (group_size * 4 == kBlock<F>) return f.template operator()<F, 4>();
  }
  if constexpr (kBlock<F> / kMinGroup >= 2) {
    if (group_size * 2 == kBlock<F>) return f.template operator()<F, 2>();
  }
  f.template operator()<F, 1>();
}
template <class Function>
LILY_INLINE void visit(const Matrix& m, Function&& f) {
  switch (m.format) {
    case kQ4:
      return visit_span<kQ4>(m.group_size, f);
    case kQ8:
      return visit_span<kQ8>(m.group_size, f);
    case kBf16:
      return f.template operator()<kBf16, 1>();
    case kF16:
      return f.template operator()<kF16, 1>();
    case kF32:
      return f.template operator()<kF32, 1>();
  }
}

// kWidth scales or biases from `p`, or the first `count` of them and zeros.
template <bool Wide>
LILY_INLINE VF load_scales(const uint8_t* p) {
  if constexpr (Wide) return load_block<kF32>(p);
  return Codec<kBf16>::code<0>(load_block<kBf16>(p));
}
template <bool Wide>
LILY_INLINE VF load_scales(const uint8_t* p, uint32_t count) {
  if constexpr (Wide) return load_block<kF32>(p, 4 * count);
  if (count * 2 == kWidth) return Codec<kBf16>::code<0>(load_block<kBf16>(p, kWidth));  // of a size known here
  return Codec<kBf16>::code<0>(load_block<kBf16>(p, 2 * count));
}

// Each of `S` values over its share of the lanes.
template <int S>
LILY_INLINE VF spread(const float* value) {
  VF out = broadcast(value[S - 1]);
  for (int i = S - 2; i >= 0; --i) out = kLane < (i + 1) * kWidth / S ? broadcast(value[i]) : out;
  return out;
}

}  // namespace lily::LILY_ISA
