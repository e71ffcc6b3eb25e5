// Rows whose states rest on the host and are updated on the device: states in, the kernel, states
// out, chunk by chunk.
#pragma once

#include "engine_state.h"
#include "upload.h"

namespace hytrain_fx {

class StreamedVisits {
 public:
  StreamedVisits(EngineState& state, StagingArea& staging) : state_(state), staging_(staging) {}

  // At a commit, whose event of the compute stream is `end`.
  void begin(Row& row, const CommitItem& item, const EventPtr& end, const float* skip);
  // The row whose next chunk goes first and whether it may be updated; -1 where none is committed.
  int next(bool& ready) const;
  // Puts a chunk on its way. The lock is let go meanwhile.
  InFlight send(const Upload& upload, EngineLock& lock);

 private:
  struct Array {
    void* home;
    int64_t width;  // bytes of one element
  };
  using Arrays = std::array<Array, 1 + kMaxStates>;
  struct Lanes {  // begin and end on each; begins while recording
    EventPtr in_begin, in, update_begin, updated, out_begin, out;
  };
  static Arrays arrays_of(const HostStates& host);
  Lanes visit(const Row& row, const Upload& upload, uint64_t before, bool sends_weight, bool recording);
  void await_home(const EventPtr& stored, uint64_t visit);

  EngineState& state_;
  StagingArea& staging_;
  uint64_t home_ = 0;  // the last visit whose way home the lane to the device waits for
};

}  // namespace hytrain_fx
