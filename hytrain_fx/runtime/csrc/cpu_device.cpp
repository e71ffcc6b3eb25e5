// Lanes as threads: what a GPU's copy engines do, with delays that a test can set.
//
// The compute stream is the calling thread, so its events are done when recorded and a compute wait
// blocks the caller; or, for a stream that is not null, the WorkQueue that it points to.
#include <array>
#include <atomic>
#include <climits>
#include <cstring>

#include "work_queue.h"

namespace hytrain_fx {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(20);
constexpr int kEndless = INT_MAX;

class CpuDevice : public Device {
 public:
  void bind_thread() override {}
  EventPtr record_compute(void* stream) override {
    begin_operation();
    auto event = std::make_shared<CpuEvent>();
    on(stream, [event] { event->fire(); });
    return event;
  }
  void compute_wait(void* stream, const EventPtr& event) override {
    begin_operation();
    recorded(event, "compute");
    on(stream, [event] { event->sync(); });
  }
  void gather(void* stream, const std::vector<DeviceCopy>& copies) override {
    begin_operation();
    on(stream, [copies] {
      for (const DeviceCopy& copy : copies) std::memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes));
    });
  }
  EventPtr record(Lane lane) override {
    auto event = std::make_shared<CpuEvent>(!can_be_shown(lane));
    put(lane, [this, lane, event] {
      event->fire();
      if (can_be_shown(lane)) hidden(lane).push_back(event);
    });
    return event;
  }
  void show(Lane lane) override {
    put(lane, [this, lane] {
      for (const auto& event : hidden(lane)) event->show();
      hidden(lane).clear();
    });
  }
  bool shows_events() override { return true; }
  void wait(Lane lane, const EventPtr& event) override {
    recorded(event, "lane");
    put(lane, [event] { event->sync(); });
  }
  uint32_t* flags(size_t n) override { return flags_.emplace_back(std::make_unique<uint32_t[]>(n)).get(); }
  void wait_flag(Lane lane, const uint32_t* flag, uint32_t value) override {
    put(lane, [=] {
      while (!is_raised(flag, value)) std::this_thread::sleep_for(kPollInterval);
    });
  }
  void copy(Lane lane, void* dst, const void* src, size_t bytes) override {
    WorkQueue* on = &thread(lane);
    put(lane, [=] {
      on->delay();
      std::memcpy(dst, src, bytes);
    });
  }
  void update(Lane lane, const std::vector<DeviceUpdate>& rows) override {
    WorkQueue* on = &thread(lane);
    put(lane, [=] {
      on->delay();
      for (const DeviceUpdate& u : rows) {
        if (u.skip && *u.skip != 0.0f) continue;
        if (u.low) {
          update_split_chunk(u.grad, u.dtype, static_cast<uint16_t*>(u.out), u.low, u.states, u.numel, u.scalars);
          continue;
        }
        update_chunk(u.grad, u.dtype, u.master, u.states, u.out, u.out_dtype, u.numel, u.scalars);
      }
    });
  }
  void set_delay(Lane lane, double mean_us) override { thread(lane).delay_us = mean_us; }
  void fail_after(int operations) override { operations_left_ = operations; }
  void take_epoch() override {}  // events are timed by the host
  double now_us() override { return clock_us(); }

 private:
  template <class Work>
  static void on(void* stream, Work work) {
    if (stream) {
      static_cast<WorkQueue*>(stream)->enqueue(std::move(work));
    } else {
      work();
    }
  }
  template <class Work>
  void put(Lane lane, Work work) {
    begin_operation();
    place(lane);
    thread(lane).enqueue(std::move(work));
  }
  void begin_operation() {
    if (operations_left_ == kEndless) return;
    if (operations_left_.fetch_sub(1) > 0) return;
    operations_left_ = 0;
    throw DeviceError("injected device error");
  }
  // Events of a lane that have come, and nobody can see. Its own thread's.
  std::vector<std::shared_ptr<CpuEvent>>& hidden(Lane lane) { return hidden_[static_cast<int>(lane)]; }
  WorkQueue& thread(Lane lane) { return lanes_[static_cast<int>(lane)]; }
  std::atomic<int> operations_left_{kEndless};
  std::vector<std::unique_ptr<uint32_t[]>> flags_;
  std::array<std::vector<std::shared_ptr<CpuEvent>>, kLanes> hidden_;
  std::array<WorkQueue, kLanes> lanes_;  // last: their work uses the rest
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace hytrain_fx
