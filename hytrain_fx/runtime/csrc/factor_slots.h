// The factors of commits, in host memory: a copy brings those that are on the device. Two halves
// are used in turn.
//
// With them comes whether the step counts at all, where a commit says that a factor tells so
// (GradScaler).
#pragma once

#include "engine_state.h"

namespace hytrain_fx {

struct FactorLanding {  // the factors of a commit, on their way
  EventPtr event;
  const float* values;
  int count;
  uint64_t commit;
  int skip;  // the one that leaves the step out where it is not zero, or -1
  bool leaves_out() const { return skip >= 0 && values[skip] != 0.0f; }
};

class FactorSlots {
 public:
  explicit FactorSlots(EngineState& state) : state_(state) {}

  // The half that the next commit reads; waits until the commit before the last has read it.
  float* await_next();
  // Whether the last commit that might be left out was; waits until that is known.
  bool await_skipped();
  bool knows_skipped();

  // With the lock held: the half of the commit that begins. An error where factors are on their way
  // to it, or where it is not known whether the last commit counts.
  float* next_half() const;
  // Begins the copies of those that are on the device; does nothing where there are none.
  bool bring(float* slots, const void* const* factors, int count, const EventPtr& end);
  void on_way(bool any, bool skip);
  void came(const FactorLanding& landing);

 private:
  float* half_of(uint64_t commit) const { return state_.options.factor_slots + (commit % 2) * state_.options.factor_capacity; }

  EngineState& state_;
  std::array<bool, 2> on_way_{};               // by half
  bool skip_on_way_ = false, skipped_ = false;  // of the last commit that might be left out
};

}  // namespace hytrain_fx
