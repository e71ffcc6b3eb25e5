// What wait nodes, eager reads and close call: until new weights are there, and states at rest.
#pragma once

#include "early_updates.h"
#include "flagged_tail.h"
#include "homeward.h"

namespace hytrain_fx {

class Waits {
 public:
  Waits(EngineState& state, EarlyUpdates& early, FlaggedTail& tail, Homeward& homeward)
      : state_(state), early_(early), tail_(tail), homeward_(homeward) {}

  // Like Engine::wait(), settle() and drain().
  void wait(const int32_t* rows, int n, void* stream);
  void settle(const int32_t* rows, int n);
  void drain(const int32_t* rows, int n);

 private:
  void finish(Row& row, EngineLock& lock);
  template <class Done>
  void await_issued(Row& row, EngineLock& lock, Done issued);

  EngineState& state_;
  EarlyUpdates& early_;
  FlaggedTail& tail_;
  Homeward& homeward_;
};

}  // namespace hytrain_fx
