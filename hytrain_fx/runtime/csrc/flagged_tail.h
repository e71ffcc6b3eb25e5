// The rest of a step, put on the lane to the device at once: new weights that are not updated, each
// chunk after a flag that its update raises, and states of streamed rows, each visit after the one
// that leaves the staging memory it takes. What its queue has no room for follows as it goes on.
//
// The launching thread can leave wait() only when the copies of a row's new weight are on the lane:
// before that the compute stream has nothing to wait for. So while the next copy is chosen when the
// lane has room, it launches no forward before the last backward has ended, and its next commit
// comes late in a backward, with workers and link idle until then. With the rest of a step on the
// lane, once somebody waits for it, the thread goes on while that work is done, and the next commit
// comes before its backward. Gradients need not have come: their chunks are PROMISED, and stand on
// the lane in the order in which they are likely to be updated (lane_order.h). Workers take them in
// this order, too.
//
// What stands on the lane waits for the device, the lander and workers only, and these call no
// driver for it. So nobody waits for a launching thread that is blocked in the driver, in a
// synchronisation or before a full queue. (If the compute stream waited for copies that are not
// issued, loss.item() would never return: while it waits, the driver lets no other thread issue a
// copy. Seen with driver 580 on an H200.) For the same reason no driver call that may block is made
// with the lock held while chunks are flagged: lander and workers take the lock.
//
// A row whose wait() has passed stays PASSED until its last chunk is updated. What the launching
// thread does to it meanwhile belongs to the next step: release() and arms hold from then on. Its
// gradient is noted (NEXT_GRAD), and cannot land before the flags are up, since the compute stream
// makes it after them. Whoever else asks for the row waits for its end; commit() waits for the end
// of all rows.
#pragma once

#include <vector>

#include "engine_state.h"
#include "lane_order.h"
#include "lane_progress.h"
#include "upload.h"

namespace hytrain_fx {

class Backward;

class FlaggedTail {
 public:
  explicit FlaggedTail(EngineState& state) : state_(state) {}

  // Whether the rest of the step can be put on the lane: someone waits for it, and nothing is left
  // in between except what the engine and the device do by themselves.
  bool may_be_sent() const;
  // What is to be put on the lane, in its order, and what tells how far that has come. From here on,
  // chunks that are not updated are FLAGGED or PROMISED. `busy_bytes`: the lane has those to copy
  // before; `slots`: of staging memory.
  std::vector<Upload> take(int64_t busy_bytes, int slots, LaneProgress& lane);
  // The uploader looks how far the lane is, and waits: until there is room on it for more, and until
  // the last streamed states are on the device, for FinishTimes and to learn how fast the lane is.
  void await_room(LaneProgress& lane, uint64_t commit, EngineLock& lock);
  void await_states(LaneProgress& lane, uint64_t commit, EngineLock& lock);
  // Whether the lane's queue has room for one more copy, beside what was left there and `places`.
  bool has_room(int64_t places);
  // Copies sent before the rest of a step, and those of a rest when all of it is on the lane: they
  // take places until they have come. When a copy has come that was sent after them, all have.
  void leave(const OnLane& copy) { before_.add(copy); }
  void leave(const LaneProgress& lane) { before_.add(lane); }
  void all_left_has_come() { before_ = {}; }
  bool is_followed() const { return following_; }
  void set_followed(bool on) { following_ = on; }
  // Returns when no chunk is flagged, or when the engine has failed.
  void await_end(EngineLock& lock) const;

 private:
  std::vector<LaneItem> items(const Backward& backward, double now_us) const;
  void flag(const Key& key, int place);
  template <class Reached>
  void follow(LaneProgress& lane, uint64_t commit, Reached reached, EngineLock& lock);

  EngineState& state_;
  LaneProgress before_;  // what was left
  bool following_ = false;  // the rest of a step, with streamed updates in it, is on the lane
  LearntRates rates_;
  int lands_last_ = -1;  // the row whose gradient does, of those to come
};

}  // namespace hytrain_fx
