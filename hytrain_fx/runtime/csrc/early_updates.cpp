#include "early_updates.h"

namespace hytrain_fx {

void EarlyUpdates::begin(const int32_t* rows, int n, const UpdateScalars& scalars) {
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    if (!row.on_host() || row.phase != Phase::GRAD || row.withdrawn > 0 || !guesses_.may_guess(row, row.guess.count())) continue;
    if (!row.has_states_for(scalars)) continue;  // its commit tells
    CommitItem item{};
    item.row = row.index;
    item.n_factors = row.guess.count();
    item.scalars = scalars;
    row.begin_update(item, state_.commits);
    row.phase = Phase::EARLY;
    row.factors_are = Factors::GUESSED;
    row.early_commit = state_.commits;
    state_.goes_ahead = true;
    state_.queue_ready(row);
  }
}

void EarlyUpdates::give_up(Row& row) {
  row.phase = Phase::GRAD;
  row.factors_are = Factors::KNOWN;  // none is on its way for it
  for (int c = 0; c < row.size(); ++c) {
    Chunk& chunk = row.chunks[c];
    state_.ready.erase(row.key(c));
    if (chunk.taken > 0) {
      tally_.count(row, chunk.guessed_params(), true);
      updates_.withdraw(chunk, row.key(c));
    } else if (chunk.is(ChunkState::QUEUED)) {
      chunk.set_state(ChunkState::LANDED);
    }
  }
  row.early_commit.reset();
}

void EarlyUpdates::give_up_all() {
  for (Row& row : state_.rows) {
    if (row.phase == Phase::EARLY) give_up(row);
  }
}

void EarlyUpdates::withdraw(const int32_t* rows, int n, EngineLock& lock) {
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    if (row.phase == Phase::EARLY) give_up(row);
  }
  auto are_back = [&] {
    for (int i = 0; i < n; ++i) {
      const Row& row = state_.row(rows[i]);
      if (row.withdrawn > 0 && row.phase != Phase::PENDING) return state_.has_failed();
    }
    return true;
  };
  state_.await(lock, "states that were updated ahead of step() were not back", are_back);
}

}  // namespace hytrain_fx
