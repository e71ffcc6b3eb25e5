// Gradients back from their slots: for a backward that adds to them, and for readers of `.grad`.
//
// They have their own lane, although two lanes to the device starve each other (uploader.h). When a
// backward finds gradients in slots, the forward has waited for all weights. Only weights of a part
// of the model that it did not run may still be on their way.
#pragma once

#include <map>

#include "engine_state.h"
#include "flagged_tail.h"

namespace hytrain_fx {

class GradFetches {
 public:
  GradFetches(EngineState& state, const FlaggedTail& tail) : state_(state), tail_(tail) {}

  // Like Engine::fetch() and fetched().
  uint64_t begin(const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream);
  void await(uint64_t fetch, void* stream);
  const EventPtr& last() const { return last_; }  // with the lock held

 private:
  EngineState& state_;
  const FlaggedTail& tail_;
  std::map<uint64_t, EventPtr> fetches_;  // not waited for yet, by number
  uint64_t count_ = 0;
  EventPtr last_;
};

}  // namespace hytrain_fx
