// A loop that launches ahead of a slow backward. Gradients of units come one after the other. Of each
// unit two rows, which leave together, are updated by the CPU, and one is streamed. One of the first
// two, such as a norm's weight, may be read until the end of the backward. The other one of unit 0 is
// like an embedding tied to the head: read at the backward's begin only, and its gradient comes last.
// The last backward does not begin on the device before the launching thread has passed the next
// forward's gates. Prints whether it does, then what came to the device in that step, in order: w for
// a weight, s for states, with the number of the unit, "w0'" for what is read until the end. Compiled
// and run by tests/cpu/test_ahead_of_backward.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <string>
#include <vector>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

constexpr int kRowsOfUnit = 3, kUnits = 8, kSlots = 3, kSteps = 4, kRecords = 4096;
constexpr int32_t kTied = 0;
constexpr int64_t kSize = 4096;
constexpr auto kUnitTime = std::chrono::milliseconds(12);

}  // namespace

int main() {
  const EngineOnCpu on_cpu(2, kSize, kSlots);
  Engine* engine = on_cpu.engine;
  std::vector<F32Row> rows(kRowsOfUnit * kUnits, F32Row(kSize));  // of unit u: from kRowsOfUnit * u, the last one streamed
  std::vector<float> slots(rows.size() * kSize);  // those of a unit are neighbours
  std::vector<CommitItem> items;
  for (int32_t r = 0; r < static_cast<int32_t>(rows.size()); ++r) {
    items.push_back(add_row(engine, r, r / kRowsOfUnit, rows[r], &slots[r * kSize], r % kRowsOfUnit == kRowsOfUnit - 1));
  }

  WorkQueue compute;
  std::vector<TaskRecord> records(kRecords);
  auto passed = std::make_shared<CpuEvent>();
  bool in_time = true;
  for (int step = 0; step <= kSteps; ++step) {
    auto forward = std::async(std::launch::async, [&] {
      for (int32_t unit = 0; unit < kUnits; ++unit) {
        const int32_t first = kRowsOfUnit * unit, all[] = {first, first + 1, first + 2};
        check(hytrain_wait(engine, all, kRowsOfUnit, &compute));
      }
    });
    in_time = forward.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    if (step == kSteps) passed->fire();
    forward.wait();
    if (step == kSteps) break;
    check(hytrain_record(engine, step == kSteps - 1));
    std::vector<int32_t> late;
    for (int32_t unit = kUnits - 1; unit >= 0; --unit) {
      compute.enqueue([passed, is_last = step == kSteps - 1] {
        if (is_last) passed->sync();
        std::this_thread::sleep_for(kUnitTime);
      });
      const int32_t first = kRowsOfUnit * unit, by_cpu[] = {first, first + 1}, streamed = first + 2;
      const void* grads[] = {rows[first].grad.data(), rows[first + 1].grad.data()};
      check(hytrain_grad_offload(engine, by_cpu, grads, 2, &compute));
      check(hytrain_arm_cpu(engine, by_cpu, 2));
      check(hytrain_arm_gpu(engine, &streamed, 1, &compute));
      check(hytrain_arm_reload(engine, by_cpu, 2));
      std::vector<int32_t> released{streamed};
      if (unit > 0) released.push_back(first);
      if (unit == kUnits - 1) released.push_back(kTied);
      check(hytrain_release(engine, released.data(), static_cast<int>(released.size()), &compute));
      late.push_back(first + 1);
    }
    check(hytrain_release(engine, late.data(), kUnits, &compute));
    check(hytrain_commit(engine, items.data(), static_cast<int>(items.size()), nullptr, 0, -1, &compute));
  }
  std::vector<int32_t> all(rows.size());
  for (size_t r = 0; r < all.size(); ++r) all[r] = static_cast<int32_t>(r);
  check(hytrain_drain(engine, all.data(), static_cast<int>(all.size())));
  int n = 0;
  check(hytrain_take_records(engine, records.data(), kRecords, &n));
  std::sort(records.begin(), records.begin() + n, [](const TaskRecord& a, const TaskRecord& b) { return a.begin_us < b.begin_us; });
  std::string order;
  for (int i = 0; i < n; ++i) {
    const int unit = records[i].row / kRowsOfUnit, row = records[i].row % kRowsOfUnit;
    if (records[i].kind == 3) order += " w" + std::to_string(unit) + (row == 1 ? "'" : "");
    if (records[i].kind == 6) order += " s" + std::to_string(unit);
  }
  std::printf("%s:%s\n", in_time ? "in time" : "held up", order.c_str());
  check(hytrain_destroy(engine));
  return 0;
}
