// The workers: threads that update granules, lowest unit first, and carry states home where nothing
// is to be updated.
#pragma once

#include <vector>

#include "homeward.h"
#include "updates.h"

namespace hytrain_fx {

class Workers {
 public:
  Workers(EngineState& state, Updates& updates, Homeward& homeward);

  void run(int worker);  // its thread's

 private:
  bool may_update(int worker) const { return !state_.ready.empty() && worker < sharing(); }
  // How many workers share the updates. Those that are left out while updates go ahead of their
  // commit leave memory to the thread that launches the backward; but not while the device waits for
  // updates of the last step.
  int sharing() const {
    return state_.goes_ahead && state_.flagged_rows == 0 ? state_.early_workers : state_.options.workers;
  }
  void update(int worker, const Key& key, EngineLock& lock);

  EngineState& state_;
  Updates& updates_;
  Homeward& homeward_;
  std::vector<int32_t> cores_;  // by worker; empty: not pinned
};

}  // namespace hytrain_fx
