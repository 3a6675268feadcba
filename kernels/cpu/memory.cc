#include "memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

namespace lily {

void* allocate_pages(size_t bytes, bool huge) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (huge) madvise(address, bytes, MADV_HUGEPAGE);
#else
  (void)huge;
#endif
  return address;
}

void free_pages(void* address, size_t bytes) { munmap(address, bytes); }

void* load_library(const char* path, std::string& error) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "lily_kernels");
  if (symbol == nullptr) {
    const char* reason = dlerror();
    error = reason != nullptr ? reason : "it exports no lily_kernels";
  }
  return symbol;
}

}  // namespace lily
