// A team of threads that runs one function together, with barriers inside it.
//
// A step has hundreds of barriers, microseconds apart, so a thread first spins. If its partner has lost its core to
// another program, spinning would keep that core's scheduler from moving the partner here: after a while it sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace headlong {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Throws std::exception if a thread or memory cannot be had.
  explicit Pool(int threads) : size_(threads) {
    try {
      for (int index = 1; index < threads; index++) workers_.emplace_back([this, index] { serve(index); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  int size() const { return size_; }

  // Calls job(thread) on every thread of the team, the caller's among them, and returns when all are done.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    start_.fetch_add(1);
    start_.notify_all();
    job(0);
    barrier();
  }

  // Called by all threads of a running job.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.fetch_add(1, std::memory_order_release);
      turn_.notify_all();
      return;
    }
    wait_until_changed(turn_, turn);
  }

 private:
  static constexpr int kSpins = 4000;  // tens of microseconds: longer than the threads of a calm team differ

  static void wait_until_changed(std::atomic<uint32_t>& value, uint32_t known) {
    for (int spin = 0; spin < kSpins; spin++) {
      if (value.load(std::memory_order_acquire) != known) return;
      pause_briefly();
    }
    while (value.load(std::memory_order_acquire) == known) value.wait(known, std::memory_order_acquire);
  }

  void end() {
    stopping_ = true;
    start_.fetch_add(1);
    start_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void serve(int index) {
    uint32_t seen = 0;
    while (true) {
      wait_until_changed(start_, seen);
      seen++;
      if (stopping_) return;
      (*job_)(index);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

}  // namespace headlong
