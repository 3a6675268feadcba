#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lily {
namespace {

constexpr uint32_t kSpinsBeforeYield = 2000;  // tens of microseconds: longer than most stages are apart
constexpr uint32_t kYieldsBeforePark = 200;
constexpr uint64_t kSerialStride = uint64_t{1} << 24;  // more launches than any plan has

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin, then give the core away: on a machine with fewer free cores than threads, spinning starves the one it waits
// for.
class Backoff {
 public:
  bool exhausted() const { return turns_ >= kSpinsBeforeYield + kYieldsBeforePark; }
  void turn() {
    if (turns_ < kSpinsBeforeYield) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
    if (!exhausted()) ++turns_;
  }

 private:
  uint32_t turns_ = 0;
};

// A recurrent state that decays for thousands of tokens reaches denormals, which cost a hundred cycles each.
void flush_denormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | (uint64_t{1} << 24)));
#endif
}

}  // namespace

std::string NativePlan::build(const DispatchRecord* dispatches, size_t count, const BindingRecord* records,
                              size_t binding_count, const std::byte* blob, size_t blob_size,
                              const std::vector<const Kernel*>& kernels) {
  bindings.assign(records, records + binding_count);
  constants.assign(blob, blob + blob_size);
  launches.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const DispatchRecord& record = dispatches[i];
    if (record.kernel >= kernels.size()) return "a dispatch names a kernel that does not exist";
    const Kernel* kernel = kernels[record.kernel];
    if (record.binding_count != kernel->buffer_count)
      return std::string("kernel ") + kernel->name + " takes " + std::to_string(kernel->buffer_count) +
             " buffers, not " + std::to_string(record.binding_count);
    if (record.constants_size != kernel->constants_size)
      return std::string("kernel ") + kernel->name + " takes " + std::to_string(kernel->constants_size) +
             " bytes of constants, not " + std::to_string(record.constants_size);
    if (record.binding_first + uint64_t{record.binding_count} > binding_count ||
        record.constants_offset + uint64_t{record.constants_size} > blob_size)
      return std::string("kernel ") + kernel->name + " is bound outside the plan's records";
    const uint64_t tasks = uint64_t{record.tasks[0]} * record.tasks[1] * record.tasks[2];
    if (tasks == 0 || tasks > UINT32_MAX) return std::string("kernel ") + kernel->name + " has no or too many tasks";
    if (i == 0 || record.barrier) stages.push_back({static_cast<uint32_t>(i), static_cast<uint32_t>(i), 0});
    stages.back().last = static_cast<uint32_t>(i + 1);
    stages.back().tasks += tasks;
    launches.push_back({kernel, record.binding_first, record.binding_count, record.constants_offset,
                        record.constants_size, static_cast<uint32_t>(tasks), std::max(1u, record.threads[0])});
    worker_bytes = std::max<uint64_t>(worker_bytes, record.worker_bytes);
  }
  for (const BindingRecord& binding : bindings) {
    if (binding.slot >= extents.size()) extents.resize(binding.slot + 1, 0);
    extents[binding.slot] = std::max(extents[binding.slot], binding.offset + binding.size);
  }
  next = std::make_unique<Counter[]>(launches.size());
  done = std::make_unique<Counter[]>(stages.size());
  return {};
}

Runtime::Runtime(uint32_t threads) : workers_(std::max(1u, threads)) {
  for (uint32_t i = 0; i < workers_.size(); ++i) {
    workers_[i].worker.index = i;
    workers_[i].worker.count = static_cast<uint32_t>(workers_.size());
    workers_[i].worker.prepared = UINT64_MAX;
  }
  for (uint32_t i = 1; i < workers_.size(); ++i) helpers_.emplace_back([this, i] { help(i); });
  runner_ = std::thread([this] { run_queue(); });
}

Runtime::~Runtime() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    cancel_.store(true);
  }
  queued_.notify_all();
  runner_.join();
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
  for (WorkerMemory& worker : workers_) std::free(worker.memory);
}

uint64_t Runtime::submit(std::shared_ptr<NativePlan> plan, const std::vector<Buffer>& slots, std::string& error) {
  for (size_t slot = 0; slot < plan->extents.size(); ++slot) {
    if (plan->extents[slot] > (slot < slots.size() ? slots[slot].size : 0)) {
      error = "the plan needs " + std::to_string(plan->extents[slot]) + " bytes in slot " + std::to_string(slot) +
              " but its buffer has " + std::to_string(slot < slots.size() ? slots[slot].size : 0);
      return 0;
    }
  }
  Job job{std::move(plan), {}, 0};
  job.buffers.reserve(job.plan->bindings.size());
  for (const BindingRecord& binding : job.plan->bindings)
    job.buffers.push_back({slots[binding.slot].data + binding.offset, binding.size});
  std::lock_guard lock(mutex_);
  job.ticket = ++last_ticket_;
  const uint64_t ticket = job.ticket;
  queue_.push_back(std::move(job));
  queued_.notify_one();
  return ticket;
}

bool Runtime::wait(uint64_t ticket, double seconds, RunState& state) {
  std::unique_lock lock(mutex_);
  const bool over =
      finished_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return finished_ticket_ >= ticket; });
  if (!over) {
    state = RunState::kQueued;
    return false;
  }
  const bool cancelled =
      std::find(cancelled_tickets_.begin(), cancelled_tickets_.end(), ticket) != cancelled_tickets_.end();
  state = cancelled ? RunState::kCancelled : RunState::kDone;
  return true;
}

void Runtime::cancel() {
  std::unique_lock lock(mutex_);
  if (finished_ticket_ == last_ticket_) return;
  for (const Job& job : queue_) cancelled_tickets_.push_back(job.ticket);
  const uint64_t running = queue_.empty() ? last_ticket_ : queue_.front().ticket - 1;
  if (running > finished_ticket_) {
    cancelled_tickets_.push_back(running);
    cancel_.store(true);
  }
  queue_.clear();
  const uint64_t last = last_ticket_;
  // Tickets finish in order: dropped ones count as finished once the running one has ended.
  finished_.wait(lock, [&] { return running <= finished_ticket_; });
  finished_ticket_ = std::max(finished_ticket_, last);
  finished_.notify_all();
}

void Runtime::run_queue() {
  flush_denormals();
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      job = std::move(queue_.front());
      queue_.pop_front();
      cancel_.store(false);
    }
    execute(job);
    {
      std::lock_guard lock(mutex_);
      finished_ticket_ = std::max(finished_ticket_, job.ticket);
      if (cancelled_tickets_.size() > 1024)
        cancelled_tickets_.erase(cancelled_tickets_.begin(), cancelled_tickets_.begin() + 512);
    }
    finished_.notify_all();
  }
}

void Runtime::reserve_scratch(uint64_t bytes) {
  const uint64_t rounded = (bytes + 63) / 64 * 64;
  for (WorkerMemory& worker : workers_) {
    if (worker.worker.scratch_size >= rounded) continue;
    std::free(worker.memory);
    worker.memory = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (worker.memory == nullptr) throw std::bad_alloc();
    worker.worker.scratch = worker.memory;
    worker.worker.scratch_size = rounded;
  }
}

void Runtime::execute(Job& job) {
  NativePlan& plan = *job.plan;
  reserve_scratch(plan.worker_bytes);
  for (size_t i = 0; i < plan.launches.size(); ++i) plan.next[i].value.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < plan.stages.size(); ++i) plan.done[i].value.store(0, std::memory_order_relaxed);
  current_.store(&job);
  generation_.fetch_add(1);
  generation_.notify_all();
  work(job, workers_[0].worker);
  // A helper either sees that the job is over or is counted here, so none is inside it when it is reset or freed.
  current_.store(nullptr);
  while (active_.load() != 0) pause_briefly();
}

void Runtime::help(uint32_t index) {
  flush_denormals();
  uint32_t seen = 0;
  for (;;) {
    Backoff backoff;
    while (generation_.load() == seen) {
      if (backoff.exhausted()) {
        generation_.wait(seen);
      } else {
        backoff.turn();
      }
    }
    seen = generation_.load();
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    active_.fetch_add(1);
    if (Job* job = current_.load()) work(*job, workers_[index].worker);
    active_.fetch_sub(1);
  }
}

// Every thread walks the stages. A stage is over when its tasks are, not when every thread has come by: a thread that
// the system has put aside holds up nobody unless it has a chunk in hand.
void Runtime::work(Job& job, Worker& worker) {
  NativePlan& plan = *job.plan;
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const NativePlan::Stage& stage = plan.stages[s];
    std::atomic<uint64_t>& done = plan.done[s].value;
    for (uint32_t i = stage.first; i < stage.last; ++i) {
      const NativePlan::Launch& launch = plan.launches[i];
      const Call call{
          launch.kernel->name,           job.buffers.data() + launch.binding_first,       launch.binding_count,
          launch.constants_size,         plan.constants.data() + launch.constants_offset, launch.tasks,
          job.ticket * kSerialStride + i};
      for (;;) {
        const uint64_t begin = plan.next[i].value.fetch_add(launch.grain, std::memory_order_relaxed);
        if (begin >= launch.tasks) break;
        const uint64_t end = std::min<uint64_t>(begin + launch.grain, launch.tasks);
        if (!cancel_.load(std::memory_order_relaxed))
          launch.kernel->run(call, static_cast<uint32_t>(begin), static_cast<uint32_t>(end), worker);
        done.fetch_add(end - begin, std::memory_order_acq_rel);
      }
    }
    Backoff backoff;
    while (done.load(std::memory_order_acquire) != stage.tasks) backoff.turn();
  }
}

}  // namespace lily
