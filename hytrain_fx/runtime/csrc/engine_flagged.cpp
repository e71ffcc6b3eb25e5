// New weights that stand on the lane to the device before they are updated, each chunk behind a flag that its update raises.
//
// The launching thread can leave wait() only when the copies of a row's new weight are on the lane: there is nothing to make the compute stream
// wait for before. So after the last wait() of a forward it launches a whole backward while every worker is idle, and only then step() gives them
// work. When the lane has nothing else to carry, it can be given the rest of a step at once. Then the launching thread goes on while the CPU
// updates the last rows, and the next commit comes that much earlier.
//
// What stands on the lane waits for workers alone, and they call no driver: so also a launching thread that is blocked in the driver, in a
// synchronisation or in front of a full queue, is waited for by nobody. (Were the compute stream to wait for copies that are yet to be issued,
// loss.item() would never return: while it waits, the driver lets no other thread issue a copy. Seen with driver 580 on an H200.) For the same
// reason no call of the driver that may block is made with the lock held while chunks are flagged: workers take it.
//
// A row whose wait() has passed stays PENDING until its last chunk is updated. What the launching thread does to it meanwhile is of the next step:
// release() and arms hold from then on as they stand, its gradient is noted (`next_gradient`), and cannot land before the flags are up, since the
// compute stream makes it behind them. Whoever else asks for the row waits for its end, commit() for that of all rows.
#include "engine.h"

namespace hytrain_fx {

// Whether the rest of the step can be put on the lane now: someone waits for it, and nothing but updates by the CPU is between.
bool Engine::may_flag() {
  if (waiting_ == 0 || !failure_.empty() || !streaming_.empty() || !updated_.empty() || !ahead_.empty()) return false;
  bool any = false;
  EventPtr asked;
  for (const Row& row : rows_) {
    if (row.phase != Phase::PENDING || row.issued == static_cast<int>(row.chunks.size()) || row.passed) continue;
    if (row.place != Place::HOST || !may_flag_row(row)) return false;
    if (row.released != asked && !row.released->done()) return false;
    asked = row.released;
    any = true;
  }
  return any;
}

// Not where the new weight takes the place of the gradient: were the update to fail, the gradient would go out as the weight.
bool Engine::may_flag_row(const Row& row) {
  if (new_weight(row) == row.host.slot) return false;
  if (!row.armed_reload || !row.released || !row.factors_known || row.skipped || row.early) return false;
  for (const Chunk& chunk : row.chunks) {
    if (!chunk.flag || !chunk.landed || !chunk.queued || chunk.guessed > 0 || chunk.flagged) return false;
  }
  return true;
}

// By the uploader, whose lane is empty: what is updated is issued. In the order in which workers take the rest.
void Engine::send_flagged(std::unique_lock<std::mutex>& lock) {
  std::set<Key> keys;
  for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
    Row& row = rows_[r];
    if (row.phase != Phase::PENDING || row.passed || row.issued == static_cast<int>(row.chunks.size())) continue;
    for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
      Chunk& chunk = row.chunks[c];
      if (chunk.finished == chunk.granules) continue;
      chunk.flagged = true;
      ++chunk.raised;
      if (row.flagged++ == 0) ++flagged_rows_;
      keys.insert({row.spec.unit, r, c});
    }
  }
  const bool recording = recording_;
  lock.unlock();
  sleep_us(reload_delay_us_);
  std::vector<std::pair<Upload, InFlight>> sent;
  for (const Key& key : keys) {
    const Upload upload{key[1], key[2]};
    const Row& row = rows_[upload.row];
    const Chunk& chunk = row.chunks[upload.chunk];
    if (fail_copy_row_ == upload.row) throw std::runtime_error("injected failure in row " + std::to_string(upload.row));
    device_->wait_flag(Lane::H2D, chunk.flag, chunk.raised);
    sent.emplace_back(upload, copy_weight(row, upload, recording));
  }
  lock.lock();
  for (const auto& [upload, copy] : sent) {
    note_copy(upload, copy);
    weight_was_sent(rows_[upload.row], copy.end, ++issues_);
  }
}

// The flag goes up last: what it lets through may be the row's next gradient.
void Engine::end_flagged_chunk(Row& row, Chunk& chunk) {
  chunk.flagged = false;
  if (--row.flagged == 0) {
    --flagged_rows_;
    row.last_busy_us = row.busy_us;
    if (row.passed) make_current(row);
    issued_cv_.notify_all();
  }
  __atomic_exchange_n(chunk.flag, chunk.raised, __ATOMIC_SEQ_CST);  // also behind stores that went past the caches
}

// The step is over for a row that wait() has passed.
void Engine::make_current(Row& row) {
  row.passed = false;
  row.phase = row.next_gradient ? Phase::GRAD : Phase::IDLE;
  if (row.next_gradient) begin_chunks(row);
  row.next_gradient = false;
}

// Returns when no chunk is flagged, or when the engine has failed.
void Engine::end_flagged(std::unique_lock<std::mutex>& lock) {
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), [this] { return flagged_rows_ == 0 || !failure_.empty(); })) {
    throw std::runtime_error("the last updates of a step had not ended after " + std::to_string(options_.timeout_s) + " s");
  }
}

// So that no stream waits for ever. What the lane carries then are old weights, or parts of new ones.
void Engine::raise_all_flags() {
  for (Row& row : rows_) {
    for (Chunk& chunk : row.chunks) {
      if (chunk.flagged) __atomic_store_n(chunk.flag, chunk.raised, __ATOMIC_RELEASE);
    }
  }
}

}  // namespace hytrain_fx
