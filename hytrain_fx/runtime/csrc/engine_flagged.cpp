// The rest of a step, put on the lane to the device at once: new weights that are yet to be updated, each chunk behind a flag that its update
// raises, and states of streamed rows, each visit behind the one that leaves the staging memory it takes.
//
// The launching thread can leave wait() only when the copies of a row's new weight are on the lane: there is nothing to make the compute stream
// wait for before. So after the last wait() of a forward it launches a whole backward while every worker and the link are idle, and only then
// step() gives them work. With the rest of a step on the lane it goes on while that is worked off, and the next commit comes that much earlier.
// Streamed updates are held back for that until they take no longer than launching does: what comes next is then decided when the lane has room.
//
// What stands on the lane waits for workers alone, and they call no driver: so also a launching thread that is blocked in the driver, in a
// synchronisation or in front of a full queue, is waited for by nobody. (Were the compute stream to wait for copies that are yet to be issued,
// loss.item() would never return: while it waits, the driver lets no other thread issue a copy. Seen with driver 580 on an H200.) For the same
// reason no call of the driver that may block is made with the lock held while chunks are flagged: workers take it.
//
// A row whose wait() has passed stays PENDING until its last chunk is updated. What the launching thread does to it meanwhile is of the next step:
// release() and arms hold from then on as they stand, its gradient is noted (`next_gradient`), and cannot land before the flags are up, since the
// compute stream makes it behind them. Whoever else asks for the row waits for its end, commit() for that of all rows.
#include <algorithm>

#include "engine.h"

namespace hytrain_fx {
namespace {

// Streamed updates that take so many times as long as launching: also the rest of the forward is launched, and rates are as they are guessed.
constexpr double kHidden = 2.0;
constexpr auto kFollowing = std::chrono::microseconds(200);

}  // namespace

// Whether the rest of the step can be put on the lane as soon as the compute stream is so far: someone waits for it, and nothing is between but
// what the engine does by itself.
bool Engine::rest_is_near() const {
  if (waiting_ == 0 || !failure_.empty() || !ahead_.empty() || streams_long()) return false;
  bool any = !streaming_.empty();
  for (const Row& row : rows_) {
    if (!awaits_copies(row)) continue;
    if (!may_flag_row(row)) return false;
    any = any || std::any_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) { return chunk.finished < chunk.granules; });
  }
  return any;
}

// Whether that is known to be so.
bool Engine::may_send_rest() const {
  return rest_is_near() &&
         std::all_of(streaming_.begin(), streaming_.end(), [this](const Key& key) { return rows_[key[1]].open->known_done(); }) &&
         std::none_of(rows_.begin(), rows_.end(), [](const Row& row) { return awaits_copies(row) && !row.released->known_done(); });
}

// Whether what is left to be streamed will take much longer than launching a backward, at the rate of this step so far.
bool Engine::streams_long() const {
  if (streaming_.empty()) return false;
  const double sent = static_cast<double>(streamed_params_), left = static_cast<double>(streaming_params_ - streamed_params_);
  return (device_->now_us() - commit_us_) * left > kHidden * last_launching_us_ * sent;
}

// Of new weights that the CPU updates.
bool Engine::awaits_copies(const Row& row) {
  return row.phase == Phase::PENDING && row.place == Place::HOST && !row.passed && row.issued < static_cast<int>(row.chunks.size());
}

// Not where the new weight has memory of its own: were the update to fail, what was there before would go out as the weight.
bool Engine::may_flag_row(const Row& row) {
  if (new_weight(row) != row.host.master) return false;
  if (!row.armed_reload || !row.released || !row.factors_known || row.skipped || row.early) return false;
  for (const Chunk& chunk : row.chunks) {
    if (!chunk.flag || !chunk.landed || !chunk.queued || chunk.guessed > 0 || chunk.flagged) return false;
  }
  return true;
}

// Chunks that are yet to be updated have their flags from here on, in the order in which workers take them.
std::set<Engine::Key> Engine::flag_rest() {
  std::set<Key> updating;
  for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
    Row& row = rows_[r];
    if (!awaits_copies(row)) continue;
    for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
      Chunk& chunk = row.chunks[c];
      if (chunk.finished == chunk.granules) continue;
      chunk.flagged = true;
      ++chunk.raised;
      if (row.flagged++ == 0) ++flagged_rows_;
      updating.insert({row.spec.unit, r, c});
    }
  }
  return updating;
}

// What is updated, then the others lowest unit first. A weight stands behind the states that will be there before it is updated, were both kinds
// to end together; one more visit between keeps the lane from waiting for a worker.
std::vector<Engine::Upload> Engine::take_rest() {
  std::vector<Upload> rest;
  for (const Key& key : updated_) rest.push_back({key[1], key[2]});
  const std::set<Key> updating = flag_rest();
  auto params = [this](const Key& key) {
    const Chunk& chunk = rows_[key[1]].chunks[key[2]];
    return static_cast<double>(chunk.end - chunk.begin);
  };
  double to_update = 0, updated = 0, streamed = 0;  // parameters: all; of them, and of those to be streamed, what stands on the lane
  for (const Key& key : updating) to_update += params(key);
  const double to_stream = static_cast<double>(streaming_params_ - streamed_params_);
  auto next = updating.begin();
  auto add_updating = [&](double until) {
    for (; next != updating.end() && updated + params(*next) <= until; ++next) {
      updated += params(*next);
      rest.push_back({(*next)[1], (*next)[2], Load::FLAGGED});
    }
  };
  for (const Key& key : streaming_) {
    for (int c = rows_[key[1]].streamed; c < static_cast<int>(rows_[key[1]].chunks.size()); ++c) {
      add_updating((streamed - kChunk) / to_stream * to_update);
      rest.push_back({key[1], c, Load::STATES});
      streamed += params({key[0], key[1], c});
    }
  }
  add_updating(to_update);
  return rest;
}

// By the uploader. Whether streamed rows were among them: then all that it has put on the lane has come.
bool Engine::send_rest(EngineLock& lock) {
  const uint64_t commit = commits_;
  EventPtr last, before;
  std::vector<Barrier> barriers;
  following_ = !streaming_.empty();
  for (Upload& upload : take_rest()) {
    const Chunk& chunk = rows_[upload.row].chunks[upload.chunk];
    finish_.at_once += chunk.end - chunk.begin;
    if (upload.load == Load::FLAGGED) barriers.push_back({before, chunk.flag, chunk.raised});
    if (upload.load == Load::STATES) {
      upload.slot = next_staging_slot();
      before = last = stream_chunk(upload, lock).end;
    } else {
      before = issue_reload(upload, lock).end;
    }
  }
  if (last) follow(*last, barriers, commit, lock);
  return last != nullptr;
}

// Until the last streamed states are on the device, for FinishTimes. The driver is asked without the lock, and not made to wait.
void Engine::follow(Event& last, const std::vector<Barrier>& barriers, uint64_t commit, EngineLock& lock) {
  bool there = false;
  size_t next = 0;
  double asked_us = device_->now_us();
  while (!there && !stop_ && failure_.empty()) {
    lock.unlock();
    there = last.done();
    const bool held = !there && stands(barriers, next);
    if (!there) std::this_thread::sleep_for(kFollowing);
    lock.lock();
    const double now_us = device_->now_us();
    if (held && commits_ == commit) finish_.streamed_held_us += now_us - asked_us;
    asked_us = now_us;
  }
  if (commits_ == commit) finish_.streamed_us = device_->now_us() - commit_us_;
  following_ = false;
}

// Whether the lane waits for an update by the CPU. `next`: the first flag that had not been raised when this was last asked.
bool Engine::stands(const std::vector<Barrier>& barriers, size_t& next) {
  while (next < barriers.size() && is_raised(barriers[next].flag, barriers[next].raised)) ++next;
  return next < barriers.size() && (!barriers[next].before || barriers[next].before->done());
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
void Engine::end_flagged(EngineLock& lock) {
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
