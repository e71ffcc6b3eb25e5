// Streamed rows of which one may be updated only at the end of the backward, as a norm's weight,
// which Inductor may read until then. Its unit comes first in the backward; the compute stream is a
// queue that stands before that end. Prints "held up" where the updates of the other rows wait for
// it too, else "in time". Compiled and run by tests/cpu/test_late_release.py.
#include <cstdio>
#include <cstdlib>
#include <future>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

constexpr int kRows = 3, kSlots = 2;  // row r is of unit kRows - 1 - r: gradients come in the order of rows
constexpr int64_t kSize = 64;

}  // namespace

int main() {
  const EngineOnCpu on_cpu(1, kSize, kSlots);
  Engine* engine = on_cpu.engine;
  std::vector<F32Row> rows(kRows, F32Row(kSize));
  std::vector<CommitItem> items;
  for (int r = 0; r < kRows; ++r) items.push_back(add_row(engine, r, kRows - 1 - r, rows[r], nullptr, true));

  WorkQueue compute;
  auto begun = std::make_shared<CpuEvent>(), ended = std::make_shared<CpuEvent>();
  compute.enqueue([begun] { begun->sync(); });
  for (int32_t r = 0; r < kRows; ++r) {
    check(hytrain_arm_gpu(engine, &r, 1, &compute));
    if (r > 0) check(hytrain_release(engine, &r, 1, &compute));
  }
  compute.enqueue([ended] { ended->sync(); });
  const int32_t late = 0, others[] = {1, 2};
  check(hytrain_release(engine, &late, 1, &compute));
  check(hytrain_commit(engine, items.data(), kRows, nullptr, 0, -1, &compute));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // states are brought while nothing may be updated yet
  begun->fire();
  auto waited = std::async(std::launch::async, [&] { check(hytrain_wait(engine, others, 2, nullptr)); });
  const bool in_time = waited.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  ended->fire();
  waited.wait();
  const int32_t all[] = {0, 1, 2};
  check(hytrain_drain(engine, all, kRows));
  for (const F32Row& row : rows) {
    if (row.weight[0] >= 1.0f) std::exit((std::fprintf(stderr, "late_release: a row was not updated\n"), 1));
  }
  check(hytrain_destroy(engine));
  std::printf(in_time ? "in time\n" : "held up\n");
  return 0;
}
