// The uploader: all that goes to the device. New weights of rows updated on the host, and states of
// streamed rows on a visit.
//
// Both go through one lane, in an order decided here. Two streams would share the link as the
// hardware likes, which serves one of them until it runs dry (seen on an H200: new weights waited
// 200 ms for streamed states). Until somebody waits, what comes next is decided when the lane has
// room. It is the lowest unit. Where nothing is due, states are brought for the update that may come
// next. From then on all that is left stands on the lane (flagged_tail.h).
#pragma once

#include <deque>

#include "flagged_tail.h"
#include "guesses.h"
#include "streamed_visits.h"

namespace hytrain_fx {

class Uploader {
 public:
  Uploader(EngineState& state, Updates& updates, Guesses& guesses, FlaggedTail& tail, StagingArea& staging, StreamedVisits& visits)
      : state_(state), updates_(updates), guesses_(guesses), tail_(tail), staging_(staging), visits_(visits) {}

  void run();  // its thread's

 private:
  void ask_events(EngineLock& lock) const;
  Upload next_upload();
  const Key* next_of(const std::set<Key>& keys) const;
  InFlight send(const Upload& upload, EngineLock& lock);
  InFlight send_weight(const Upload& upload, EngineLock& lock);
  InFlight send_ahead(const Upload& upload, EngineLock& lock);
  InFlight copy_weight(const Row& row, const Upload& upload, bool recording);
  void note_copy(const Upload& upload, const InFlight& copy);
  void send_rest(EngineLock& lock);
  void await_first(EngineLock& lock);
  void leave_all();

  EngineState& state_;
  Updates& updates_;
  Guesses& guesses_;
  FlaggedTail& tail_;
  StagingArea& staging_;
  StreamedVisits& visits_;
  EventPtr awaited_;  // the lane's last wait for the compute stream
  std::deque<InFlight> in_flight_;
  int64_t bytes_ = 0, places_ = 0;  // of them
  int64_t placed_ = 0;  // Device::placed after the last copy: what is put there between belongs to the next
};

}  // namespace hytrain_fx
