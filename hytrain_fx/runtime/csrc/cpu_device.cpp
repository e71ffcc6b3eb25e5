// Lanes as threads: what a GPU's copy engines do, with delays that a test can set.
//
// The compute stream is the calling thread, so its events are done when recorded and a compute wait blocks the caller.
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "device.h"
#include "finite.h"

namespace hytrain_fx {
namespace {

double clock_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

class CpuEvent : public Event {
 public:
  bool done() override { return fired_.load(std::memory_order_acquire); }
  void sync() override {
    std::unique_lock<std::mutex> lock(mutex_);
    fired_cv_.wait(lock, [this] { return done(); });
  }
  double time_us() override { return time_us_; }
  void fire() {
    std::lock_guard<std::mutex> lock(mutex_);
    time_us_ = clock_us();
    fired_.store(true, std::memory_order_release);
    fired_cv_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable fired_cv_;
  std::atomic<bool> fired_{false};
  double time_us_ = 0;
};

class LaneThread {
 public:
  LaneThread() : random_(12345), thread_([this] { run(); }) { name_thread(thread_, "hytrain-lane"); }
  ~LaneThread() {
    enqueue([this] { stop_ = true; });
    thread_.join();
  }
  void enqueue(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
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
    while (!stop_) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        filled_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> queue_;
  bool stop_ = false;  // only touched on the lane's own thread
  std::mt19937 random_;
  std::thread thread_;  // last: starts when all else is built
};

class CpuDevice : public Device {
 public:
  void bind_thread() override {}
  EventPtr record_compute(void*) override {
    auto event = std::make_shared<CpuEvent>();
    event->fire();
    return event;
  }
  void compute_wait(void*, const EventPtr& event) override { recorded(event, "compute").sync(); }
  void gather(void*, const std::vector<DeviceCopy>& copies) override {
    for (const DeviceCopy& copy : copies) std::memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes));
  }
  EventPtr record(Lane lane) override {
    auto event = std::make_shared<CpuEvent>();
    thread(lane).enqueue([event] { event->fire(); });
    return event;
  }
  void wait(Lane lane, const EventPtr& event) override {
    recorded(event, "lane");
    thread(lane).enqueue([event] { event->sync(); });
  }
  void copy(Lane lane, void* dst, const void* src, size_t bytes) override {
    LaneThread* on = &thread(lane);
    on->enqueue([=] {
      on->delay();
      std::memcpy(dst, src, bytes);
    });
  }
  void update(Lane lane, const std::vector<DeviceUpdate>& rows) override {
    LaneThread* on = &thread(lane);
    on->enqueue([=] {
      on->delay();
      for (const DeviceUpdate& u : rows) {
        if (u.skip && *u.skip != 0.0f) continue;
        if (!all_finite(u.grad, u.dtype, u.numel)) __atomic_store_n(u.nonfinite.at, u.nonfinite.mark, __ATOMIC_RELAXED);
        if (u.low) {
          split_adamw_chunk(u.grad, u.dtype, static_cast<uint16_t*>(u.out), u.low, u.exp_avg, u.exp_avg_sq,
                            u.max_exp_avg_sq, u.numel, u.scalars);
          continue;
        }
        adamw_chunk(u.grad, u.dtype, u.master, u.exp_avg, u.exp_avg_sq, u.max_exp_avg_sq, u.out, u.out_dtype, u.numel, u.scalars);
      }
    });
  }
  void set_delay(Lane lane, double mean_us) override { thread(lane).delay_us = mean_us; }
  void take_epoch() override {}  // events are timed by the host
  double now_us() override { return clock_us(); }

 private:
  LaneThread& thread(Lane lane) { return lanes_[static_cast<int>(lane)]; }
  std::array<LaneThread, kLanes> lanes_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace hytrain_fx
