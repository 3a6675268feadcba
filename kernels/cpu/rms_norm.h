// RMS norm of one row in float32 (model_spec §4): x / sqrt(mean(x²) + eps) · w.
#pragma once

#include "simd.h"

namespace lily::LILY_ISA {

LILY_INLINE float rms_scale(const float* x, uint32_t n, float eps) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

LILY_INLINE void rms_norm(const float* x, const float* weight, uint32_t n, float eps, float* out) {
  const float scale = rms_scale(x, n, eps);
  for (uint32_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

}  // namespace lily::LILY_ISA
