// Pages from the system, and kernels from shared libraries.
#pragma once

#include <cstddef>
#include <string>

namespace lily {

// Zeroed pages, committed as they are touched; null if the system refuses. `huge` asks for large pages.
void* allocate_pages(size_t bytes, bool huge);
void free_pages(void* address, size_t bytes);

// The address of `lily_kernels` in the library at `path`; null with `error` set.
void* load_library(const char* path, std::string& error);

}  // namespace lily
