// Counts of updates that began before their commit (EarlyCounts).
#pragma once

#include "native_structs.h"
#include "row.h"

namespace hytrain_fx {

class EarlyTally {
 public:
  // `params` of the row were updated before their commit. `again`: they are put back, or updated
  // again.
  void count(const Row& row, int64_t params, bool again) {
    counts_.params += params;
    if (row.early_commit != last_) ++counts_.commits;
    last_ = row.early_commit;
    if (!again) return;
    counts_.redone += params;
    if (row.early_commit != last_missed_) ++counts_.missed;
    last_missed_ = row.early_commit;
  }

  // At a commit: what has landed of its rows on the host, and what waits for factors.
  void begin_commit() { counts_.host_params = counts_.landed_params = counts_.waiting_params = counts_.guessed_params = 0; }
  void count_landed(const Row& row) {
    counts_.host_params += row.spec.numel;
    for (const Chunk& chunk : row.chunks) counts_.landed_params += chunk.is(ChunkState::AWAITED) ? 0 : chunk.params();
  }
  void count_waiting(const Row& row) {
    if (row.are_factors_known()) return;
    counts_.waiting_params += row.spec.numel;
    counts_.guessed_params += row.is_guessing() ? row.spec.numel : 0;
  }

  const EarlyCounts& counts() const { return counts_; }

 private:
  EarlyCounts counts_{};
  // numbers of the last commits that count in `commits` and `missed`
  std::optional<uint64_t> last_, last_missed_;
};

}  // namespace hytrain_fx
