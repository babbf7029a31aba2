// A team of threads that computes one step together, and how the pieces of a step are handed out to it.

#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

inline void pause_or_yield(int& spins) {
  if (++spins < 4000)
    _mm_pause();
  else
    std::this_thread::yield();  // the machine is busy: whoever is waited for may need this core
}

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Have every thread call run(job, its number); returns when all have.
  void run(void (*job)(void*, int), void* data) {
    if (threads_ > 1) {
      job_ = job;
      data_ = data;
      working_.store(threads_ - 1);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        generation_.fetch_add(1);
      }
      wake_.notify_all();
    }
    job(data, 0);
    for (int spins = 0; working_.load(std::memory_order_acquire);) pause_or_yield(spins);
  }

  // Nobody goes on before all are here.
  void barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;) pause_or_yield(spins);
    }
  }

 private:
  void serve(int number) {
    unsigned seen = 0;
    while (true) {
      // Steps follow one another: look for the next one for a while before the core is given back.
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < SPINS; ++spins) _mm_pause();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stopped_) return;
      job_(data_, number);
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr int SPINS = 500;
  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  bool stopped_ = false;
  void (*job_)(void*, int) = nullptr;
  void* data_ = nullptr;
  std::atomic<int> working_{0};
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> phase_{0};
};

std::mutex one_at_a_time;
Team* team = nullptr;  // of the call that computes

// The team of so many threads; its threads sleep while another computes.
Team* team_of(int threads) {
  static std::map<int, std::unique_ptr<Team>> teams;
  auto& found = teams[threads];
  if (!found) found = std::make_unique<Team>(threads);
  return found.get();
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
  // The first of so many items to do next in this phase.
  int take(int phase, int items) { return next_[phase].fetch_add(items, std::memory_order_relaxed); }

 private:
  std::vector<std::atomic<int>> next_;
};

}  // namespace
