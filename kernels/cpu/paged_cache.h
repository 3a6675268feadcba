// The paged key/value cache of a layer: [pages, kv_heads, page_tokens, head_dim], float32 or bfloat16.
#pragma once

#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace lily::LILY_ISA {

// A cache's description among a dispatch's constants.
struct CacheShape {
  uint32_t pages;      // in the pool
  uint32_t max_pages;  // entries of the session's page table
  uint32_t page_tokens;
  uint32_t kv_heads;
  uint32_t head_dim;
};

template <class T>
class PagedCache {
 public:
  // The pool bound at argument `cache`, seen through the page table at argument `table`.
  PagedCache(const Call& call, uint32_t table, uint32_t cache, const CacheShape& shape)
      : name_(call.name),
        shape_(shape),
        table_(call.at<const int32_t>(table, shape.max_pages)),
        pool_(call.at<T>(cache, uint64_t{shape.pages} * shape.kv_heads * shape.page_tokens * shape.head_dim)) {}

  T* row(uint32_t head, uint32_t position) const {
    return page(head, position / shape_.page_tokens) + uint64_t{position % shape_.page_tokens} * shape_.head_dim;
  }

  // out[i] points at the row of position first + i.
  void rows(uint32_t head, uint32_t first, uint32_t count, T** out) const {
    for (uint32_t i = 0; i < count;) {
      const uint32_t inside = (first + i) % shape_.page_tokens;
      T* at = row(head, first + i);
      for (uint32_t end = std::min(count, i + shape_.page_tokens - inside); i < end; ++i, at += shape_.head_dim)
        out[i] = at;
    }
  }

 private:
  T* page(uint32_t head, uint32_t index) const {
    if (index >= shape_.max_pages) fail(name_, "reaches past the end of the session's page table");
    const uint32_t page = static_cast<uint32_t>(table_[index]);
    if (page >= shape_.pages) fail(name_, "found a page number outside the pool in the page table");
    return pool_ + (uint64_t{page} * shape_.kv_heads + head) * shape_.page_tokens * shape_.head_dim;
  }

  const char* name_;
  CacheShape shape_;
  const int32_t* table_;
  T* pool_;
};

LILY_INLINE VF load_cached(const float* p) { return load(p); }
LILY_INLINE VF load_cached(const uint16_t* p) {
#if LILY_WIDTH == 8 && defined(__AVX2__)  // the compiler would widen in two halves
  return bits_to_float((VU)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
#else
  return load_bf16(p);
#endif
}

LILY_INLINE void store_cached(float* p, VF v) { store(p, v); }
LILY_INLINE void store_cached(uint16_t* p, VF v) {
  for (int i = 0; i < kWidth; ++i) p[i] = to_bf16(v[i]);
}

}  // namespace lily::LILY_ISA
