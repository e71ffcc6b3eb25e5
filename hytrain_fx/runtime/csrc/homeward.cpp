#include "homeward.h"

namespace hytrain_fx {

void Homeward::bring(const int32_t* rows, int n, EngineLock& lock) {
  carry_all(lock);  // another thread may have asked for the same
  for (int i = 0; i < n; ++i) {
    const Row& row = state_.row(rows[i]);
    if ((row.phase != Phase::IDLE && row.phase != Phase::GRAD) || row.withdrawn > 0) continue;
    for (int c = 0; c < row.size(); ++c) {
      for (int g = 0; g < row.chunks[c].granules(); ++g) {
        if (row.chunks[c].shadows[g].holds) pieces_.push_back({rows[i], c, g});
      }
    }
  }
  left_ = static_cast<int>(pieces_.size());
  state_.work_cv.notify_all();
  carry_all(lock);
}

void Homeward::carry_all(EngineLock& lock) {
  while (!pieces_.empty()) carry(lock);
  state_.await(lock, "states that were updated on a guess were not home", [this] { return left_ == 0; });
}

void Homeward::carry(EngineLock& lock) {
  const Piece piece = pieces_.back();
  pieces_.pop_back();
  const Row& row = state_.rows[piece.row];
  Chunk& chunk = state_.rows[piece.row].chunks[piece.chunk];
  Shadow& shadow = chunk.shadows[piece.granule];
  const int64_t n = chunk.granule_params(piece.granule);
  const HostArrays home = row.home(chunk.granule_begin(piece.granule)), there = arrays_in(home, shadow.slot);
  lock.unlock();
  if (home.low) stream_copy(home.low, there.low, n * static_cast<int64_t>(sizeof(uint16_t)));
  for (int s = 0; s < kMaxStates; ++s) {
    if (home.states.at[s]) stream_copy(home.states.at[s], there.states.at[s], n * home.states.width);
  }
  store_fence();
  lock.lock();
  state_.shadows.give(shadow.slot);
  shadow = {};
  if (--left_ == 0) state_.issued_cv.notify_all();
}

}  // namespace hytrain_fx
