// A loop whose backward goes on for long after its last gradient has come to the host: what it does
// then is of units that are updated elsewhere. Each unit here has a matrix, which may be overwritten as
// soon as its gradient is made, and a norm, which Inductor may read until the backward's end. Prints
// for each step how many new matrices went to the device before that end. Compiled and run by
// tests/cpu/test_late_release.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <vector>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

constexpr int kUnits = 6, kSteps = 8, kRecords = 1 << 12;
constexpr int kUpdateStage = 1;  // as stages of delays are numbered
constexpr int64_t kSize = 4096;
constexpr auto kUnitTime = std::chrono::milliseconds(4), kRestTime = std::chrono::milliseconds(160);
constexpr double kUpdateUs = 10000;  // on average, of either row: all of them end before the backward does, the last shortly

}  // namespace

int main() {
  const EngineOnCpu on_cpu(1, kSize, 2);
  Engine* engine = on_cpu.engine;
  std::vector<F32Row> rows(2 * kUnits, F32Row(kSize));  // of unit u: its norm 2 u, its matrix 2 u + 1
  std::vector<float> slots(rows.size() * kSize);
  std::vector<CommitItem> items;
  for (int32_t r = 0; r < 2 * kUnits; ++r) items.push_back(add_row(engine, r, r / 2, rows[r], &slots[r * kSize], false));

  WorkQueue compute;
  std::vector<std::atomic<double>> ended_us(kSteps);
  std::vector<int32_t> norms;
  for (int32_t unit = 0; unit < kUnits; ++unit) norms.push_back(2 * unit);
  check(hytrain_set_delay(engine, kUpdateStage, kUpdateUs));
  check(hytrain_record(engine, 1));
  for (int step = 0; step < kSteps; ++step) {
    for (int32_t unit = 0; unit < kUnits; ++unit) {
      const int32_t both[] = {2 * unit, 2 * unit + 1};
      check(hytrain_wait(engine, both, 2, &compute));
    }
    for (int32_t unit = kUnits - 1; unit >= 0; --unit) {
      compute.enqueue([] { std::this_thread::sleep_for(kUnitTime); });
      const int32_t both[] = {2 * unit, 2 * unit + 1};
      const void* grads[] = {rows[both[0]].grad.data(), rows[both[1]].grad.data()};
      check(hytrain_grad_offload(engine, both, grads, 2, &compute));
      check(hytrain_arm_cpu(engine, both, 2));
      check(hytrain_arm_reload(engine, both, 2));
      check(hytrain_release(engine, both + 1, 1, &compute));
    }
    compute.enqueue([&ended = ended_us[step]] {
      std::this_thread::sleep_for(kRestTime);
      ended = clock_us();
    });
    check(hytrain_release(engine, norms.data(), kUnits, &compute));
    check(hytrain_commit(engine, items.data(), static_cast<int>(items.size()), nullptr, 0, -1, &compute));
  }
  const auto copies = records_by_step(engine, rows.size(), kToDevice, kSteps, kRecords);
  for (int step = 0; step < kSteps; ++step) {
    const auto is_early = [&ended = ended_us[step]](const TaskRecord& copy) { return copy.row % 2 && copy.begin_us < ended; };
    std::printf("%d\n", static_cast<int>(std::count_if(copies[step].begin(), copies[step].end(), is_early)));
  }
  check(hytrain_destroy(engine));
  return 0;
}
