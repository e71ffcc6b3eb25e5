// Which granule a worker takes next, and what becomes of a chunk when it has finished one.
#pragma once

#include "engine_state.h"
#include "host_update.h"

namespace hytrain_fx {

class Updates {
 public:
  explicit Updates(EngineState& state) : state_(state) {}

  // The next granule of a chunk that is ready. Where there is no shadow for it: false, and the
  // chunk is set aside until its factors are known.
  bool take(const Key& key, Task& task);
  // Call it when a granule is done, or when the guessed factors or the guessed commit have come.
  void finish(const Key& key);
  // The guess was wrong: what is updated is taken again, or put back, once the running granules are
  // done.
  void take_back(Chunk& chunk, const Key& key);
  // Like take_back(), with put back, for a chunk updated ahead of a commit that did not come so.
  void withdraw(Chunk& chunk, const Key& key);
  // The step was left out: nothing happens to chunks that nobody has begun.
  void leave_out(Row& row);
  // For a row whose updates began before its commit, which comes now: finished new weights may be
  // sent.
  void offer_updated_ahead(const Row& row);
  // A copy of a chunk's new weight is on its way. Copies of one row's chunks come in any order; the
  // last one on the lane is what a reader waits for.
  void count_sent(Row& row, const EventPtr& end, uint64_t issue);

 private:
  void take_again(Chunk& chunk, const Key& key, ChunkState next);
  void end_restored(const Key& key);
  void end_flagged(Row& row, Chunk& chunk);
  void offer_ahead(const Row& row, const Key& key);
  void count_left_out(Row& row, Chunk& chunk);

  EngineState& state_;
};

}  // namespace hytrain_fx
