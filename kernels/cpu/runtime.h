// The CPU host's engine room: a queue of recorded plans and the threads that run them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"

namespace lily {

// Layouts shared with lily/plan.py (DISPATCH_DTYPE and BINDING_DTYPE).
struct DispatchRecord {
  uint32_t kernel;
  uint32_t binding_first;
  uint32_t binding_count;
  uint32_t constants_offset;
  uint32_t constants_size;
  uint32_t tasks[3];
  uint32_t threads[3];
  uint32_t worker_bytes;
  uint32_t barrier;
  uint32_t reserved;
};
struct BindingRecord {
  uint32_t slot;
  uint32_t access;
  uint64_t offset;
  uint64_t size;
};

// A plan made ready: kernels resolved, stages cut. Immutable once made, apart from the counters of its one run at a
// time.
struct NativePlan {
  struct Launch {
    const Kernel* kernel;
    uint32_t binding_first;
    uint32_t binding_count;
    uint32_t constants_offset;
    uint32_t constants_size;
    uint32_t tasks;
    uint32_t grain;
  };
  struct Stage {
    uint32_t first, last;  // launches [first, last)
    uint64_t tasks;
  };
  struct alignas(64) Counter {
    std::atomic<uint64_t> value{0};
  };

  std::vector<Launch> launches;
  std::vector<Stage> stages;
  std::vector<BindingRecord> bindings;
  std::vector<std::byte> constants;
  std::vector<uint64_t> extents;  // bytes each slot must have
  uint64_t worker_bytes = 0;
  std::unique_ptr<Counter[]> next;  // a launch: first task not yet taken
  std::unique_ptr<Counter[]> done;  // a stage: tasks finished

  // Empty if the records are consistent, else what is wrong.
  std::string build(const DispatchRecord* dispatches, size_t count, const BindingRecord* bindings, size_t binding_count,
                    const std::byte* constants, size_t constants_size, const std::vector<const Kernel*>& kernels);
};

enum class RunState { kQueued, kDone, kCancelled };

class Runtime {
 public:
  explicit Runtime(uint32_t threads);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Queue one run; `slots` is copied. Runs execute in order. Returns a ticket, or 0 with `error` set.
  uint64_t submit(std::shared_ptr<NativePlan> plan, const std::vector<Buffer>& slots, std::string& error);
  // Wait at most `seconds`; false if the run is still going. `state` tells how it ended.
  bool wait(uint64_t ticket, double seconds, RunState& state);
  // End what runs now at its next chunk of tasks and drop what is queued.
  void cancel();
  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()); }

 private:
  struct Job {
    std::shared_ptr<NativePlan> plan;
    std::vector<Buffer> buffers;  // one a binding
    uint64_t ticket;
  };
  struct WorkerMemory {
    Worker worker{};
    std::byte* memory = nullptr;
  };

  void run_queue();
  void help(uint32_t index);
  void execute(Job& job);
  void work(Job& job, Worker& worker);
  void reserve_scratch(uint64_t bytes);

  std::vector<WorkerMemory> workers_;
  std::vector<std::thread> helpers_;
  std::thread runner_;

  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<Job> queue_;
  uint64_t last_ticket_ = 0;
  uint64_t finished_ticket_ = 0;
  std::vector<uint64_t> cancelled_tickets_;
  bool stopping_ = false;

  std::atomic<bool> cancel_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<Job*> current_{nullptr};
  alignas(64) std::atomic<uint32_t> active_{0};
};

}  // namespace lily
