// Whether the engine asks the device for events, or waits for them, with its lock held. Each
// question here waits until another thread has made a call that needs the lock: a launching thread,
// which would stand still for as long as a driver takes to answer. Prints "unlocked", or "locked"
// where that thread had to wait for the answer. Run by tests/cpu/test_unlocked_queries.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "engine_c.h"

#define make_cpu_device make_plain_cpu_device
#include "cpu_device.cpp"
#undef make_cpu_device

using namespace hytrain_fx;

namespace {

constexpr auto kPatience = std::chrono::seconds(10), kPause = std::chrono::seconds(0);
std::atomic<int> questions{0}, calls{0};  // calls: so many questions were seen by the thread that calls, and a call was made after that
std::atomic<bool> locked{false}, over{false};

class AskedEvent : public Event {
 public:
  explicit AskedEvent(EventPtr event) : event_(std::move(event)) {}
  double time_us() override { return event_->time_us(); }

 private:
  bool query() override {
    be_late();
    return event_->done();
  }
  void await() override {
    be_late();
    event_->sync();
  }
  static void be_late() {
    const int number = ++questions;
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (calls < number && !locked) {
      if (std::chrono::steady_clock::now() > until) locked = true;
      std::this_thread::sleep_for(kPause);
    }
  }
  EventPtr event_;
};

class AskedDevice : public CpuDevice {
 public:
  EventPtr record_compute(void* stream) override { return std::make_shared<AskedEvent>(CpuDevice::record_compute(stream)); }
  EventPtr record(Lane lane) override { return std::make_shared<AskedEvent>(CpuDevice::record(lane)); }
};

struct Kept {
  std::vector<float> weight, master, m, v, slot, grad;
  explicit Kept(int64_t size) : weight(size, 1.0f), master(weight), m(size), v(size), slot(size), grad(size, 0.5f) {}
};

}  // namespace

namespace hytrain_fx {
std::unique_ptr<Device> make_cpu_device() { return std::make_unique<AskedDevice>(); }
}  // namespace hytrain_fx

int main() {
  constexpr int64_t kSize = 1 << 20;
  constexpr int kRows = 4, kSlots = 2;  // the odd ones are streamed
  std::vector<char> ring(64 << 20);
  std::vector<float> factors(2), staging(kSlots * 3 * kSize);
  EngineOptions options{};
  options.workers = 1;
  options.device_ordinal = -1;
  options.timeout_s = 60;
  options.ring = ring.data();
  options.ring_bytes = ring.size();
  options.factor_slots = factors.data();
  options.factor_capacity = 1;  // a factor of the gradients on the host, which comes late and is guessed
  Engine* engine = nullptr;
  check(hytrain_create(&options, &engine));
  StagingMemory memory{staging.data(), kSize, 3, kSlots};
  check(hytrain_set_staging(engine, &memory));
  std::vector<char> shadows(64 << 20);
  ShadowMemory shadow{shadows.data(), static_cast<int64_t>(shadows.size()), 3};
  check(hytrain_set_shadow(engine, &shadow));
  std::vector<Kept> rows(kRows, Kept(kSize));
  std::vector<CommitItem> items(kRows);
  const int32_t all[] = {0, 1, 2, 3};
  for (int r = 0; r < kRows; ++r) {
    Kept& row = rows[r];
    RowSpec spec{kSize, r, static_cast<int32_t>(Dtype::kF32), row.weight.data()};
    check(hytrain_add_row(engine, &spec));
    const bool streamed = r % 2 == 1;
    HostStates states{row.master.data(), nullptr, {{row.m.data(), row.v.data(), nullptr}}, streamed ? nullptr : row.slot.data(), nullptr, 1};
    check(streamed ? hytrain_place_streamed(engine, r, &states) : hytrain_place_on_host(engine, r, &states));
    items[r].row = r;
    items[r].grad = streamed ? row.grad.data() : nullptr;
    items[r].n_factors = streamed ? 0 : 1;
    items[r].scalars = {1.0f, 0.0f, 0.1f, 0.95f, 0.05f, -0.01f, 1.0f, 1e-8f, 0, 0, {}, {}};
  }
  std::thread caller([engine] {
    while (!over) {
      const int seen = questions;
      int pending = 0;
      if (calls < seen) check(hytrain_pending(engine, 0, &pending));
      calls = seen;
      std::this_thread::sleep_for(kPause);
    }
  });
  WorkQueue compute;
  const float likely = 1.0f, other = 0.5f;
  GuessCounts guesses{};
  bool wrongly_sent = false;
  for (int step = 0; step < 100 && !wrongly_sent; ++step) {  // every sixth factor is another; a loaded machine may send nothing ahead then
    const int64_t sent = guesses.sent, missed = guesses.missed;
    check(hytrain_set_delay(engine, 0, 0));
    const void* factor = step % 6 == 5 ? &other : &likely;
    for (int r = kRows - 1; r >= 0; --r) {
      const int32_t row = r;
      const void* grad = rows[r].grad.data();
      if (r % 2 == 0) {
        check(hytrain_grad_offload(engine, &row, &grad, 1, &compute));
        check(hytrain_arm_cpu(engine, &row, 1));
        check(hytrain_arm_reload(engine, &row, 1));
      }
      check(hytrain_arm_gpu(engine, &row, 1, &compute));
      check(hytrain_release(engine, &row, 1, &compute));
    }
    check(hytrain_set_delay(engine, 0, 100000));  // the factor comes when updates have ended
    float* slots = nullptr;
    check(hytrain_factor_slots(engine, &slots));
    check(hytrain_commit(engine, items.data(), kRows, &factor, 1, -1, &compute));
    check(hytrain_wait(engine, all, kRows, &compute));
    check(hytrain_guess_counts(engine, &guesses));
    wrongly_sent = guesses.missed > missed && guesses.sent > sent;
  }
  check(hytrain_drain(engine, all, kRows));
  over = true;
  caller.join();
  check(hytrain_destroy(engine));
  if (questions == 0 || !wrongly_sent) {
    std::fprintf(stderr, "unlocked_queries: nothing was asked, or no weight was sent on a wrong guess\n");
    return 1;
  }
  std::printf(locked ? "locked\n" : "unlocked\n");
  return 0;
}
