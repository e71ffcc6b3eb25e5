#include "flagged_tail.h"

#include <algorithm>

namespace hytrain_fx {
namespace {

// Queue the tail once the remaining streaming takes less than this many times the launch time. The
// factor is there because the rest of the forward is launched too, and rates are guesses.
constexpr double kHidden = 2.0;
constexpr auto kFollowing = std::chrono::microseconds(200);

// Whether the lane waits for an update by the CPU. `next`: the first flag that had not been raised
// at the last call.
bool stands(const std::vector<Barrier>& barriers, size_t& next) {
  while (next < barriers.size() && is_raised(barriers[next].flag, barriers[next].raised)) ++next;
  return next < barriers.size() && (!barriers[next].before || barriers[next].before->done());
}

}  // namespace

bool FlaggedTail::is_near() const {
  if (state_.waiting == 0 || state_.has_failed() || !state_.ahead.empty() || streams_long()) return false;
  bool any = !state_.streaming.rows.empty();
  for (const Row& row : state_.rows) {
    if (!row.awaits_copies()) continue;
    if (!row.may_be_flagged()) return false;
    any = any || std::any_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) { return !chunk.is_updated(); });
  }
  return any;
}

bool FlaggedTail::may_be_sent() const {
  const std::set<Key>& streamed = state_.streaming.rows;
  return is_near() &&
         std::all_of(streamed.begin(), streamed.end(), [this](const Key& key) { return state_.row(key).open->known_done(); }) &&
         std::none_of(state_.rows.begin(), state_.rows.end(),
                      [](const Row& row) { return row.awaits_copies() && !row.released->known_done(); });
}

// Whether what is left to be streamed will take much longer than launching a backward, at the rate
// of this step so far.
bool FlaggedTail::streams_long() const {
  const StreamQueue& streaming = state_.streaming;
  if (streaming.rows.empty()) return false;
  const double sent = static_cast<double>(streaming.sent_params), left = static_cast<double>(streaming.left());
  const StepClock& clock = state_.clock;
  return clock.since_commit_us(state_.device->now_us()) * left > kHidden * clock.last_launching_us() * sent;
}

// In the order in which workers take them.
std::set<Key> FlaggedTail::flag() {
  std::set<Key> updating;
  for (Row& row : state_.rows) {
    if (!row.awaits_copies()) continue;
    for (int c = 0; c < row.size(); ++c) {
      Chunk& chunk = row.chunks[c];
      if (chunk.is_updated()) continue;
      chunk.set_state(ChunkState::FLAGGED);
      ++chunk.raised;
      if (row.flagged++ == 0) ++state_.flagged_rows;
      updating.insert(row.key(c));
    }
  }
  return updating;
}

// What is updated comes first, then the others, lowest unit first. A weight stands after the states
// that will be there before it is updated, if both kinds end together. One more visit between keeps
// the lane from waiting for a worker.
std::vector<Upload> FlaggedTail::take() {
  std::vector<Upload> rest;
  for (const Key& key : state_.updated) rest.push_back({key.row, key.chunk});
  const std::set<Key> updating = flag();
  auto params = [this](const Key& key) { return static_cast<double>(state_.chunk(key).params()); };
  // parameters: all; of them the updated, of those to be streamed the ones on the lane
  double to_update = 0, updated = 0, streamed = 0;
  for (const Key& key : updating) to_update += params(key);
  const double to_stream = static_cast<double>(state_.streaming.left());
  auto next = updating.begin();
  auto add_updating = [&](double until) {
    for (; next != updating.end() && updated + params(*next) <= until; ++next) {
      updated += params(*next);
      rest.push_back({next->row, next->chunk, Load::FLAGGED});
    }
  };
  for (const Key& key : state_.streaming.rows) {
    const Row& row = state_.row(key);
    for (int c = row.streamed.chunks; c < row.size(); ++c) {
      add_updating((streamed - kChunk) / to_stream * to_update);
      rest.push_back({key.row, c, Load::STATES});
      streamed += static_cast<double>(row.chunks[c].params());
    }
  }
  add_updating(to_update);
  return rest;
}

// The driver is asked without the lock, and not made to wait.
void FlaggedTail::follow(Event& last, const std::vector<Barrier>& barriers, uint64_t commit, EngineLock& lock) {
  bool there = false;
  size_t next = 0;
  double asked_us = state_.device->now_us();
  while (!there && !state_.stop && !state_.has_failed()) {
    lock.unlock();
    there = last.done();
    const bool held = !there && stands(barriers, next);
    if (!there) std::this_thread::sleep_for(kFollowing);
    lock.lock();
    const double now_us = state_.device->now_us();
    if (held && state_.commits == commit) state_.clock.held(now_us - asked_us);
    asked_us = now_us;
  }
  if (state_.commits == commit) state_.clock.streamed(state_.device->now_us());
  following_ = false;
}

void FlaggedTail::await_end(EngineLock& lock) const {
  state_.await(lock, "the last updates of a step had not ended", [this] { return state_.flagged_rows == 0 || state_.has_failed(); });
}

}  // namespace hytrain_fx
