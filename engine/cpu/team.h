// A team of threads that computes one step together, and how the pieces of a step are handed out to it.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

// Returns once `value` is no longer `old`. Looks for it so many times, then sleeps: where the machine is busy whoever is
// waited for may need this core, and whoever yields it again and again gets next to nothing of it.
template <typename T>
inline void await_change(const std::atomic<T>& value, T old, int looks) {
  for (int i = 0; i < looks; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

class Team {
 public:
  // Have so many threads, or as many of them as there can be now.
  void hire(int threads) {
    try {
      for (; threads_ < threads; ++threads_) std::thread([this, seen = generation_.load()] { serve(seen); }).detach();
    } catch (const std::system_error&) {
    }
  }

  int threads() const { return threads_; }

  // Have every thread do the job; returns when all have. A job that fails ends the process: the others wait for it.
  template <typename Job>
  void run(Job&& job) noexcept {
    if (threads_ > 1) {
      job_ = [](void* data) { (*static_cast<std::remove_reference_t<Job>*>(data))(); };
      data_ = &job;
      working_.store(threads_ - 1);
      generation_.fetch_add(1, std::memory_order_release);
      generation_.notify_all();
    }
    job();
    for (int left; (left = working_.load(std::memory_order_acquire));) await_change(working_, left, WITHIN_A_STEP);
  }

  // Nobody goes on before all are here.
  void barrier() {
    if (threads_ == 1) return;
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1);  // in full order: whoever falls asleep now must be seen, or see it
      phase_.notify_all();
    } else {
      await_change(phase_, phase, WITHIN_A_STEP);
    }
  }

 private:
  [[noreturn]] void serve(int seen) {
    for (;;) {
      await_change(generation_, seen, BETWEEN_STEPS);
      seen = generation_.load(std::memory_order_acquire);
      job_(data_);
      if (working_.fetch_sub(1, std::memory_order_release) == 1) working_.notify_all();
    }
  }

  static constexpr int WITHIN_A_STEP = 4000, BETWEEN_STEPS = 500;  // looks
  int threads_ = 1;
  void (*job_)(void*) = nullptr;
  void* data_ = nullptr;
  std::atomic<int> generation_{0}, working_{0}, arrived_{0}, phase_{0};
};

std::mutex one_at_a_time;
Team* team = nullptr;  // of the call that computes

// The team of so many threads; its threads sleep while another computes. Nothing here is ever destroyed, nor what a team
// computes with: a process may end while a thread of it computes.
Team* team_of(int threads) {
  static auto& teams = *new std::map<int, Team*>;
  Team*& found = teams[threads];
  if (!found) found = new Team;
  found->hire(threads);
  return found;
}

// Have a team compute: 0 if it did, 1 if there was no memory to begin. No exception may leave for callers, who speak C.
template <typename Work>
int computed(int threads, Work&& work) {
  try {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    team = team_of(threads);
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Have memory that is used again hold as much, at least.
template <typename T>
void room(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
}

// Items of a phase, handed out to whoever is free.
class Counters {
 public:
  explicit Counters(int phases) : next_(phases) {
    for (auto& each : next_) each.store(0, std::memory_order_relaxed);
  }
  // Have this thread do its part of `total` items of a phase, work(from, to) at a time: the fewer are left the fewer at
  // once, at least `unit`, so that all threads are done at about the same time.
  template <typename Work>
  void hand_out(int phase, int total, int threads, int unit, Work&& work) {
    std::atomic<int>& next = next_[phase];
    for (int from = next.load(std::memory_order_relaxed); from < total;) {
      const int to = std::min(total, from + std::max(unit, (total - from) / (2 * threads) / unit * unit));
      if (!next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
      work(from, to);
      from = next.load(std::memory_order_relaxed);
    }
  }
  // The same of single items, work(i).
  template <typename Work>
  void each(int phase, int total, int threads, Work&& work) {
    hand_out(phase, total, threads, 1, [&](int from, int to) {
      for (int i = from; i < to; ++i) work(i);
    });
  }

 private:
  std::vector<std::atomic<int>> next_;
};

}  // namespace
