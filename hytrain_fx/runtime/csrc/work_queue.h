// What the CPU device has for streams and events. The device includes it, and so does tests/native,
// which gives the device other compute streams.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <random>
#include <thread>

#include "device.h"
#include "locks.h"

namespace hytrain_fx {

inline double clock_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

class CpuEvent : public Event {
 public:
  // `shown`: else it is seen to come only after show(), as on a GPU.
  explicit CpuEvent(bool shown = true) : shown_(shown) {}
  void show() { shown_.store(true, std::memory_order_release); }
  double time_us() override { return time_us_; }
  void fire() {
    std::lock_guard lock(mutex_);
    time_us_ = clock_us();
    fired_.store(true, std::memory_order_release);
    fired_cv_.notify_all();
  }

 private:
  bool query() override { return fired_.load(std::memory_order_acquire); }
  bool shows() override { return shown_.load(std::memory_order_acquire) && query(); }
  void await() override {
    std::unique_lock lock(mutex_);
    fired_cv_.wait(lock, [this] { return query(); });
  }

  OrderedMutex<LockOrder::kEvent> mutex_;
  Condition fired_cv_;
  std::atomic<bool> fired_{false}, shown_;
  double time_us_ = 0;
};

// Work in its order on a thread of its own: a lane, or a compute stream.
class WorkQueue {
 public:
  WorkQueue() : random_(12345), thread_([this] { run(); }) { name_thread(thread_, "hytrain-lane"); }
  ~WorkQueue() {
    enqueue([this] { stop_ = true; });
    thread_.join();
  }
  void enqueue(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    filled_.notify_one();
  }
  void delay() {
    double mean = delay_us.load();
    if (mean <= 0) return;
    std::uniform_real_distribution<double> spread(0.0, 2.0 * mean);
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(spread(random_)));
  }
  std::atomic<double> delay_us{0.0};

 private:
  void run() {
    set_arithmetic();
    while (!stop_) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        filled_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }
  OrderedMutex<LockOrder::kQueue> mutex_;
  Condition filled_;
  std::deque<std::function<void()>> queue_;
  bool stop_ = false;  // only touched on the lane's own thread
  std::mt19937 random_;
  std::thread thread_;  // last: starts when all else is built
};

}  // namespace hytrain_fx
