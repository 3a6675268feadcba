// The contract between the CPU host and its kernels, those of plugins included.
//
// A kernel is one function over a range of independent tasks. The host splits the tasks of a dispatch between its
// threads, so a kernel may be entered several times, on several threads, for one dispatch; ranges never overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace lily {

constexpr uint32_t kAbiVersion = 1;

// One bound byte range. The host has checked that it lies inside its buffer.
struct Buffer {
  std::byte* data;
  uint64_t size;  // bytes
};

[[noreturn]] inline void fail(const char* kernel, const char* what) {
  std::fprintf(stderr, "lily: kernel %s: %s\n", kernel, what);
  std::abort();
}

// One execution of one dispatch.
struct Call {
  const char* name;
  const Buffer* buffers;  // in the order in which the variant bound them
  uint32_t buffer_count;
  uint32_t constants_size;
  const void* constants_data;
  uint32_t tasks;
  uint64_t serial;  // differs between any two executions

  // The first element of buffer `index`, which must hold `count` elements from there: a mistake in a variant's
  // declared ranges stops the process here, in every build, before memory is touched.
  template <class T>
  T* at(uint32_t index, uint64_t count) const {
    if (index >= buffer_count) fail(name, "reads a buffer that was not bound");
    if (count * sizeof(T) > buffers[index].size) fail(name, "needs more bytes than were bound");
    return reinterpret_cast<T*>(buffers[index].data);
  }
  uint64_t bytes(uint32_t index) const { return index < buffer_count ? buffers[index].size : 0; }
  template <class T>
  const T& constants() const {
    if (constants_size != sizeof(T)) fail(name, "was given constants of another size");
    return *static_cast<const T*>(constants_data);
  }
};

// What a thread owns. `scratch` holds the `worker_bytes` that the dispatch asked for, 64-byte aligned; its content
// lasts as long as `prepared == call.serial`, so work shared by a thread's tasks is done once a dispatch.
struct Worker {
  uint32_t index;
  uint32_t count;
  std::byte* scratch;
  uint64_t scratch_size;
  uint64_t prepared;

  bool first_entry(const Call& call) {
    if (prepared == call.serial) return false;
    prepared = call.serial;
    return true;
  }
  template <class T>
  T* take(const Call& call, uint64_t offset, uint64_t count) {
    if (offset + count * sizeof(T) > scratch_size) fail(call.name, "needs more worker scratch than it asked for");
    return reinterpret_cast<T*>(scratch + offset);
  }
};

using KernelFunction = void (*)(const Call& call, uint32_t begin, uint32_t end, Worker& worker);

struct Kernel {
  const char* name;
  KernelFunction run;
  uint32_t buffer_count;
  uint32_t constants_size;
};

struct KernelTable {
  uint32_t abi_version;
  uint32_t count;
  const Kernel* kernels;
};

}  // namespace lily

// A plugin's shared library exports its table under this name, with C linkage.
#define LILY_EXPORT_KERNELS(table) \
  extern "C" __attribute__((visibility("default"))) const lily::KernelTable* lily_kernels() { return &(table); }
