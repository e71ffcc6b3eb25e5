// Updates of rows whose states rest on the device: kernels on the update lane, each after its
// gradients and the last readers of its weights.
#pragma once

#include <vector>

#include "engine_state.h"

namespace hytrain_fx {

class DeviceUpdates {
 public:
  explicit DeviceUpdates(EngineState& state) : state_(state) {}

  // At a commit, whose event of the compute stream is `end`.
  void launch(const std::vector<const CommitItem*>& items, const EventPtr& end, const float* skip);

 private:
  using Launch = std::vector<const CommitItem*>;
  std::vector<Launch> launches(const std::vector<const CommitItem*>& items) const;
  void launch_together(const Launch& items, const EventPtr& end, const float* skip);
  void note(const Launch& items, const EventPtr& before, const EventPtr& after);
  const Row& row_of(const CommitItem* item) const { return state_.rows[item->row]; }

  EngineState& state_;
};

}  // namespace hytrain_fx
