// How much of the queue of the lane to the device is taken by what steps put there. The queue
// is short, and each copy takes its time, so new weights and streamed states must wait for places.
// Prints the most places that were taken at once, where somebody waits for all weights at each commit
// and where all is sent before, and how many places there are. Run by tests/cpu/test_lane_places.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <numeric>
#include <thread>
#include <utility>

#include "engine_c.h"

#define make_cpu_device make_plain_cpu_device
#include "cpu_device.cpp"
#undef make_cpu_device

using namespace hytrain_fx;

namespace {

std::atomic<int64_t> most_taken{0};

class CountedDevice : public CpuDevice {
 public:
  EventPtr record(Lane lane) override {
    EventPtr event = CpuDevice::record(lane);
    if (lane == Lane::H2D) look(event);
    return event;
  }
  void show(Lane lane) override {
    CpuDevice::show(lane);
    if (lane == Lane::H2D) look(nullptr);
  }

 private:
  void look(const EventPtr& event) {
    const int64_t placed = this->placed(Lane::H2D);
    if (event) rest_.push_back({event, placed});
    for (; !rest_.empty() && rest_.front().first->done(); rest_.pop_front()) came_ = rest_.front().second;
    most_taken = std::max<int64_t>(most_taken, placed - came_);
  }
  std::deque<std::pair<EventPtr, int64_t>> rest_;
  int64_t came_ = 0;
};

bool is_streamed(int row) { return row % 3 == 1; }

}  // namespace

namespace hytrain_fx {
std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CountedDevice>(); }
}  // namespace hytrain_fx

int main() {
  constexpr int64_t kSize = 1 << 10;
  constexpr int kRows = 120, kSlots = 3, kPlaces = 160, kSteps = 4;  // every third row is streamed
  constexpr int kToDevice = 6;
  constexpr double kCopyUs = 200;
  constexpr auto kLate = std::chrono::milliseconds(100);
  EngineOnCpu on_cpu(1, kSize, kSlots, kPlaces);
  Engine* engine = on_cpu.engine;
  std::vector<F32Row> rows(kRows, F32Row(kSize));
  std::vector<std::vector<float>> slots(kRows, std::vector<float>(kSize));
  std::vector<CommitItem> items;
  std::vector<int32_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  for (int r : all) items.push_back(add_row(engine, r, r, rows[r], is_streamed(r) ? nullptr : slots[r].data(), is_streamed(r)));
  check(hytrain_set_delay(engine, kToDevice, kCopyUs));
  WorkQueue compute;
  auto step = [&](std::chrono::milliseconds late) {
    for (int32_t r = kRows - 1; r >= 0; --r) {
      const void* grad = rows[r].grad.data();
      if (!is_streamed(r)) {
        check(hytrain_grad_offload(engine, &r, &grad, 1, &compute));
        check(hytrain_arm_cpu(engine, &r, 1));
        check(hytrain_arm_reload(engine, &r, 1));
      }
      check(hytrain_arm_gpu(engine, &r, 1, &compute));
      check(hytrain_release(engine, &r, 1, &compute));
    }
    check(hytrain_commit(engine, items.data(), kRows, nullptr, 0, -1, &compute));
    std::this_thread::sleep_for(late);
    check(hytrain_wait(engine, all.data(), kRows, &compute));
  };
  for (const auto late : {std::chrono::milliseconds(0), kLate}) {
    most_taken = 0;
    for (int s = 0; s < kSteps; ++s) step(late);
    check(hytrain_drain(engine, all.data(), kRows));
    std::printf("%lld ", static_cast<long long>(most_taken));
  }
  check(hytrain_destroy(engine));
  std::printf("%d\n", kPlaces);
  return 0;
}
