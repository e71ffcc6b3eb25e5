// One copy on the lane to the device, before and after it is put there.
#pragma once

#include "staging_area.h"

namespace hytrain_fx {

enum class Load : uint8_t {
  WEIGHT,   // a new weight
  AHEAD,    // one whose factors are not known
  FLAGGED,  // one that is not updated, after its flag
  STATES,   // states of a streamed row
};

struct Upload {
  int row = -1, chunk = 0;
  Load load = Load::WEIGHT;
  StagingSlot* slot = nullptr;  // of states
  bool is_shown = true;         // else its end is seen when that of a later one is
};

struct InFlight {  // on the lane, in its order
  EventPtr end;
  int64_t bytes;
  EventPtr begin;      // while recording
  int64_t places = 0;  // that it takes in the lane's queue (Device::placed)
};

}  // namespace hytrain_fx
