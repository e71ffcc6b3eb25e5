// What step() calls: hyper-parameters fixed, updates let go.
#pragma once

#include "device_updates.h"
#include "early_updates.h"
#include "flagged_tail.h"
#include "homeward.h"
#include "lander.h"
#include "streamed_visits.h"

namespace hytrain_fx {

class Commit {
 public:
  struct Parts {  // of the engine
    Updates& updates;
    FactorSlots& slots;
    Guesses& guesses;
    EarlyUpdates& early;
    EarlyTally& tally;
    Homeward& homeward;
    FlaggedTail& tail;
    Lander& lander;
    StreamedVisits& visits;
    DeviceUpdates& on_device;
  };
  Commit(EngineState& state, const Parts& parts) : state_(state), parts_(parts) {}

  // Like Engine::commit().
  void run(const CommitItem* items, int n, const void* const* factors, int n_factors, int skip, void* stream);

 private:
  void await_last_step(EngineLock& lock);
  bool bring(float* slots, const void* const* factors, int n_factors, const EventPtr& end, EngineLock& lock);
  void begin_step(double called_us);
  void check(const CommitItem& item);
  void release(const CommitItem& item, const EventPtr& end);
  void begin_on_host(const CommitItem& item, const void* const* factors, const float* slots, bool may_skip);
  bool has_ended() const;

  EngineState& state_;
  Parts parts_;
};

}  // namespace hytrain_fx
