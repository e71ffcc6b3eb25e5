// The order in which the rest of a step goes on the lane to the device, when it is put there before
// its updates have run, and before its gradients have come.
//
// A copy that stands on the lane holds up all that is behind it. So they stand in the order in
// which they will be ready, as calculated here: workers take the lowest unit that has landed; the
// lane takes, of what is ready when it has room, the lowest unit, as it does while it decides from
// copy to copy. States may be brought before their rows may be updated, where staging memory is
// free.
#pragma once

#include <vector>

#include "row.h"

namespace hytrain_fx {

struct LaneItem {
  Key key;
  bool is_states;     // of a streamed row; else a new weight
  double bytes;       // on the lane
  double params = 0;  // that the CPU has yet to update; states: none
  double landed_us;   // when the gradient is on the host; states: when the row may be updated
  double released_us = 0;  // when nobody reads the weight any more
};

struct LaneRates {
  double params_per_us;  // of all workers together; 0: not known, updates take no time
  double bytes_per_us;   // of the lane, once the backward has sent its last gradient
  double bytes_per_us_in_backward;
  double backward_ends_us;  // when that has landed
};

struct LaneOrder {
  std::vector<size_t> items;  // places in what was asked about, in the order for the lane
  size_t in_backward = 0;     // up to the last states that have come when the backward ends
  double planned_us = 0;      // for these, from now on
};

// Times are the host's; the lane is free at `now_us`. Of one row's states the first chunk comes first.
// `slots`: staging slots for states.
LaneOrder lane_order(const std::vector<LaneItem>& items, const LaneRates& rates, int slots, double now_us);

}  // namespace hytrain_fx
