#include "updates.h"

namespace hytrain_fx {

bool Updates::take(const Key& key, Task& task) {
  Row& row = state_.row(key);
  Chunk& chunk = state_.chunk(key);
  task = {0, false, chunk.redo < chunk.redo_end, row.is_skipped() || chunk.is_withdrawn(), {}, row.scalars};
  if (task.again) {
    task.granule = chunk.redo++;
  } else {
    task.guessed = !row.are_factors_known();
    Shadow& shadow = chunk.shadows[chunk.taken];
    if (task.guessed && !shadow.slot && state_.shadows.is_empty()) {
      state_.ready.erase(key);
      chunk.set_state(ChunkState::LANDED);
      return false;
    }
    if (task.guessed && !shadow.slot) shadow.slot = state_.shadows.take();
    chunk.guessed += task.guessed;
    task.granule = chunk.taken++;
  }
  task.shadow = chunk.shadows[task.granule];
  if ((chunk.taken == chunk.granules() || task.restore) && chunk.redo == chunk.redo_end) state_.ready.erase(key);
  for (int i = 0; i < row.n_factors; ++i) {
    task.scalars.factors[i] = task.guessed ? row.guess.guessed(i) : row.guess.known(i);
  }
  task.scalars.factor_count = static_cast<uint32_t>(row.n_factors);
  if (row.has_copy()) task.scalars.flags |= kWideFactors;
  return true;
}

void Updates::finish(const Key& key) {
  Row& row = state_.row(key);
  Chunk& chunk = state_.chunk(key);
  if (chunk.finished == chunk.taken) {
    if (chunk.is(ChunkState::TAKEN_BACK)) take_again(chunk, key, ChunkState::QUEUED);
    if (chunk.is(ChunkState::WITHDRAWN)) take_again(chunk, key, ChunkState::RESTORING);
  }
  if (chunk.is_withdrawn()) {
    if (chunk.is(ChunkState::RESTORING) && chunk.finished == chunk.taken) end_restored(key);
    return;
  }
  if (chunk.finished < (row.is_skipped() ? chunk.taken : chunk.granules())) return;
  if (!row.are_factors_known()) {
    chunk.set_state(ChunkState::GUESSED);
    return offer_ahead(row, key);
  }
  state_.ahead.erase(key);
  state_.shadows.settle(chunk, !row.is_skipped());
  if (row.is_skipped() && !chunk.send_back) return count_left_out(row, chunk);
  chunk.send_back = false;
  state_.clock.updated(state_.device->now_us());
  if (chunk.ahead) {
    chunk.set_state(ChunkState::SENT);
    count_sent(row, chunk.ahead, chunk.ahead_issue);
    chunk.ahead = nullptr;
  } else if (chunk.is(ChunkState::FLAGGED)) {
    end_flagged(row, chunk);
  } else {
    chunk.set_state(ChunkState::UPDATED);
    state_.updated.insert(key);
  }
  state_.upload_cv.notify_one();
}

void Updates::take_back(Chunk& chunk, const Key& key) {
  chunk.set_state(ChunkState::TAKEN_BACK);
  finish(key);
}

void Updates::withdraw(Chunk& chunk, const Key& key) {
  chunk.set_state(ChunkState::WITHDRAWN);
  ++state_.row(key).withdrawn;
  finish(key);
}

void Updates::take_again(Chunk& chunk, const Key& key, ChunkState next) {
  chunk.set_state(next);
  chunk.redo = 0;
  chunk.redo_end = chunk.guessed;
  chunk.finished -= chunk.redo_end;
  state_.ready.insert(key);
  state_.work_cv.notify_all();
}

void Updates::end_restored(const Key& key) {
  Row& row = state_.row(key);
  Chunk& chunk = state_.chunk(key);
  state_.shadows.settle(chunk, false);
  chunk.begin_granules();
  chunk.set_state(ChunkState::LANDED);
  --row.withdrawn;
  if (row.phase == Phase::PENDING && row.is_skipped()) {
    count_left_out(row, chunk);
  } else {
    state_.queue_ready(row, key.chunk);  // it was committed meanwhile, with other numbers
  }
  state_.issued_cv.notify_all();
}

// The flag goes up last: what it lets through may be the row's next gradient.
void Updates::end_flagged(Row& row, Chunk& chunk) {
  chunk.set_state(ChunkState::SENT);
  chunk.place = 0;
  if (--row.flagged == 0) {
    --state_.flagged_rows;
    row.last_busy_us = row.busy_us;
    if (row.has_passed()) row.end_passed();
    state_.issued_cv.notify_all();
  }
  // also after stores that bypassed the caches
  __atomic_exchange_n(chunk.flag, chunk.raised, __ATOMIC_SEQ_CST);
}

void Updates::leave_out(Row& row) {
  for (int c = 0; c < row.size(); ++c) {
    if (row.chunks[c].guessed > 0) continue;
    state_.ready.erase(row.key(c));
    count_left_out(row, row.chunks[c]);
  }
}

void Updates::count_left_out(Row& row, Chunk& chunk) {
  chunk.set_state(ChunkState::LEFT_OUT);
  ++row.issued;
  if (row.is_issued()) state_.notify_issued(row);
}

// The weight of a chunk that was updated on a guess may go to the device ahead of its factors,
// since the lane is idle then. Nothing reads it there before wait(), which waits for the factors
// too. What is updated again, or put back, is sent again after that.
void Updates::offer_ahead(const Row& row, const Key& key) {
  if (row.phase != Phase::PENDING || !row.is_guessing()) return;
  state_.ahead.insert(key);
  state_.upload_cv.notify_one();
}

void Updates::offer_updated_ahead(const Row& row) {
  for (int c = 0; c < row.size(); ++c) {
    if (row.chunks[c].is_updated()) offer_ahead(row, row.key(c));
  }
}

void Updates::count_sent(Row& row, const EventPtr& end, uint64_t issue) {
  if (issue > row.issue) {
    row.give_weight(end);
    row.issue = issue;
  }
  ++row.issued;
  if (row.is_issued()) {
    row.last_busy_us = row.busy_us;
    state_.notify_issued(row);
  }
}

}  // namespace hytrain_fx
