// Updates before step(). In a loop that waits for the device between backward() and step() (loss.item(), a norm that is printed) nothing would
// be updated until the whole backward has run. So, where such a loop has been learned (session/foresight.py), each row is committed on a guess as soon
// as its gradient is on the way: the hyper-parameters that its group has then, the likely factors (engine_guess.cpp). So are those of a loop
// whose factors are guessed anyway: they would wait for step() alone.
//
// Such a row is EARLY: workers update it as one with guessed factors (engine_guess.cpp), the gradient in its slot, no weight to the device.
// commit() with the same numbers makes it a guessed row, or lets it go at once where no factor is on its way. With other numbers, or without
// the row, and where states or gradient are asked for before: it is put back, bit for bit.
#include <chrono>
#include <cstring>

#include "engine.h"

namespace hytrain_fx {

void Engine::commit_early(const CommitItem* items, int n) {
  EngineLock lock(mutex_);
  carry_all_home(lock);  // another thread's drain() may be reading the states
  throw_if_failed();
  for (int i = 0; i < n; ++i) {
    Row& row = at(items[i].row);
    if (row.place != Place::HOST || row.phase != Phase::GRAD || row.put_back > 0 || !may_guess(row, row.n_values)) continue;
    CommitItem item = items[i];
    item.n_factors = row.n_values;
    begin_update(row, item);
    row.phase = Phase::EARLY;
    row.early = row.guessing = true;
    row.factors_known = false;
    row.early_commit = commits_;
    queue_all_ready(row, items[i].row);
  }
}

bool Engine::was_foreseen(const Row& row, const CommitItem& item) {
  return row.phase == Phase::EARLY && row.n_factors == item.n_factors && std::memcmp(&row.scalars, &item.scalars, sizeof(AdamScalars)) == 0;
}

// The row has its gradient and nothing else, as before commit_early(); what was updated is put back behind the caller.
void Engine::give_up_early(Row& row, int index) {
  row.phase = Phase::GRAD;
  row.guessing = row.early = false;
  row.factors_known = true;  // none is on its way for it
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    Chunk& chunk = row.chunks[c];
    const Key key{row.spec.unit, index, c};
    ready_.erase(key);
    chunk.queued = false;
    if (chunk.taken == 0) continue;
    count_early(row, guessed_params(chunk), true);
    chunk.queued = chunk.undo = chunk.put_back = true;
    ++row.put_back;
    finish_task(key);
  }
}

void Engine::chunk_was_put_back(const Key& key) {
  Row& row = rows_[key[1]];
  Chunk& chunk = row.chunks[key[2]];
  settle_shadows(chunk, false);
  chunk.taken = chunk.finished = chunk.redo = chunk.redo_end = 0;
  chunk.queued = chunk.put_back = false;
  --row.put_back;
  if (row.phase == Phase::PENDING && row.skipped) {
    chunk_left_out(row);
  } else {
    queue_if_ready(row, key[1], key[2]);  // it was committed meanwhile, with other numbers
  }
  issued_cv_.notify_all();
}

// Returns when no update of these rows is ahead of its commit, with states as the last commit left them; or when the engine has failed.
void Engine::withdraw(const int32_t* rows, int n, EngineLock& lock) {
  for (int i = 0; i < n; ++i) {
    if (at(rows[i]).phase == Phase::EARLY) give_up_early(at(rows[i]), rows[i]);
  }
  auto are_back = [&] {
    for (int i = 0; i < n; ++i) {
      if (at(rows[i]).put_back > 0 && at(rows[i]).phase != Phase::PENDING) return !failure_.empty();
    }
    return true;
  };
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), are_back)) {
    throw std::runtime_error("states that were updated ahead of step() were not back after " + std::to_string(options_.timeout_s) + " s");
  }
}

void Engine::count_early(const Row& row, int64_t params, bool again) {
  early_.params += params;
  if (row.early_commit != last_early_) ++early_.commits;
  last_early_ = row.early_commit;
  if (!again) return;
  early_.redone += params;
  if (row.early_commit != last_missed_) ++early_.missed;
  last_missed_ = row.early_commit;
}

void Engine::count_landed(const Row& row) {
  early_.host_params += row.spec.numel;
  for (const Chunk& chunk : row.chunks) early_.landed_params += chunk.landed ? chunk.end - chunk.begin : 0;
}

void Engine::count_waiting(const Row& row) {
  if (row.factors_known) return;
  early_.waiting_params += row.spec.numel;
  early_.guessed_params += row.guessing ? row.spec.numel : 0;
}

EarlyCounts Engine::early_counts() {
  std::lock_guard lock(mutex_);
  return early_;
}

}  // namespace hytrain_fx
