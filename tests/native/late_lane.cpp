// A loop whose lane to the device is slower while the backward runs than after it. Of each unit three
// rows are streamed and one is updated by the CPU, or all are streamed (an argument: 4); gradients come
// from the last unit to the first. Prints for each step how many visits of later units came between
// the backward's end and the last visit of unit 0, which the next forward needs first, and how many
// visits came before that end. Compiled and run by tests/cpu/test_lane_pace.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <vector>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

constexpr int kRowsOfUnit = 4, kUnits = 12, kSlots = 6, kSteps = 24, kRecords = 1 << 14;
constexpr int kStreamIn = 6;                    // as kinds of records and stages of delays are numbered
constexpr double kSlowUs = 900, kFastUs = 100;  // of one copy; a visit has three
constexpr int64_t kSize = 4096;
constexpr auto kUnitTime = std::chrono::milliseconds(5);

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int count, char** arguments) {
  const int streamed_of_unit = count > 1 ? std::atoi(arguments[1]) : kRowsOfUnit - 1;
  const EngineOnCpu on_cpu(1, kSize, kSlots);
  Engine* engine = on_cpu.engine;
  std::vector<F32Row> rows(kRowsOfUnit * kUnits, F32Row(kSize));  // of unit u: from kRowsOfUnit * u, the first one updated by the CPU
  std::vector<float> slots(rows.size() * kSize);
  std::vector<CommitItem> items;
  for (int32_t r = 0; r < static_cast<int32_t>(rows.size()); ++r) {
    items.push_back(add_row(engine, r, r / kRowsOfUnit, rows[r], &slots[r * kSize], r % kRowsOfUnit >= kRowsOfUnit - streamed_of_unit));
  }

  WorkQueue compute;
  std::vector<std::atomic<double>> ended_us(kSteps);
  check(hytrain_record(engine, 1));
  for (int step = 0; step < kSteps; ++step) {
    for (int32_t unit = 0; unit < kUnits; ++unit) {
      const int32_t first = kRowsOfUnit * unit, all[] = {first, first + 1, first + 2, first + 3};
      check(hytrain_wait(engine, all, kRowsOfUnit, &compute));
    }
    compute.enqueue([engine] { check(hytrain_set_delay(engine, kStreamIn, kSlowUs)); });
    for (int32_t unit = kUnits - 1; unit >= 0; --unit) {
      compute.enqueue([] { std::this_thread::sleep_for(kUnitTime); });
      if (unit == 0) {
        compute.enqueue([engine, &ended = ended_us[step]] {
          ended = now_us();
          check(hytrain_set_delay(engine, kStreamIn, kFastUs));
        });
      }
      const int32_t first = kRowsOfUnit * unit, all[] = {first, first + 1, first + 2, first + 3};
      const int by_cpu = kRowsOfUnit - streamed_of_unit;  // the first ones, one at most
      const void* grad = rows[first].grad.data();
      if (by_cpu > 0) check(hytrain_grad_offload(engine, all, &grad, by_cpu, &compute));
      check(hytrain_arm_cpu(engine, all, by_cpu));
      check(hytrain_arm_gpu(engine, all + by_cpu, streamed_of_unit, &compute));
      check(hytrain_arm_reload(engine, all, by_cpu));
      check(hytrain_release(engine, all, kRowsOfUnit, &compute));
    }
    check(hytrain_commit(engine, items.data(), static_cast<int>(items.size()), nullptr, 0, -1, &compute));
  }
  const auto visits = records_by_step(engine, rows.size(), kStreamIn, kSteps, kRecords);
  for (int step = 0; step < kSteps; ++step) {
    double last_us = 0;
    for (const TaskRecord& visit : visits[step]) {
      if (visit.row < kRowsOfUnit) last_us = std::max(last_us, visit.begin_us);
    }
    const auto number = [&of = visits[step]](auto is_counted) { return static_cast<int>(std::count_if(of.begin(), of.end(), is_counted)); };
    const double end_us = ended_us[step];
    std::printf("%d %d\n", number([last_us, end_us](const TaskRecord& visit) {
      return visit.row >= kRowsOfUnit && visit.begin_us > end_us && visit.begin_us < last_us;
    }), number([end_us](const TaskRecord& visit) { return visit.begin_us < end_us; }));
  }
  check(hytrain_destroy(engine));
  return 0;
}
