#include "flagged_tail.h"

#include <algorithm>
#include <map>

namespace hytrain_fx {
namespace {

constexpr auto kFollowing = std::chrono::microseconds(100);
// Of the lane's queue. A thread that is blocked before a full one holds up the launching thread, too.
// But that passes a gate only when its weights are on the lane. What is left is for the next copy,
// with its waits and events.
constexpr double kPlacesShare = 0.9;
// Each of these is seen to come: what is smaller takes no time on the lane, but a place in its queue,
// and so would a word behind it.
constexpr double kShownBytes = 256 << 10;
constexpr int kShownApart = 8;
// Between two landings of one backward. What took longer was no backward.
constexpr double kLongestApartUs = 1e6;

bool is_landing(const Row& row) {
  return row.awaits_copies() &&
         std::any_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) { return chunk.is(ChunkState::AWAITED); });
}

}  // namespace

// Likely times of what is to come in a backward that the device is in: landings come as far apart
// as in the step before, the next one now. An event of the compute stream comes when the gradients
// that were begun before it have. Behind the last of these one comes at once, and the others are
// spread evenly until the backward's end, where the last two come: that of the graph and that of the
// commit. A norm's weight, which Inductor may read until that end, lands early and is open late; an
// embedding that is tied to the head lands last and may be open early.
class Backward {
 public:
  Backward(const Rows& rows, const BackwardEnd& end, double now_us)
      : now_us_(now_us), rest_us_(end.has_come ? 0 : end.after_us), last_mark_(end.landed_mark), end_mark_(end.mark) {
    double last_us = now_us;
    std::vector<const Row*> landing;
    for (const Row& row : rows) {
      if (is_landing(row)) landing.push_back(&row);
    }
    std::sort(landing.begin(), landing.end(), [](const Row* a, const Row* b) { return a->landing_number < b->landing_number; });
    const Row* before = nullptr;
    for (const Row* row : landing) {
      const double apart_us = before ? row->landed_us - before->landed_us : 0;
      if (apart_us > 0 && apart_us < kLongestApartUs) last_us += apart_us;
      by_row_[row->index] = last_us;
      by_mark_[row->landing_mark] = last_us;
      before = row;
    }
    last_us_ = last_us;
    if (before) {
      last_ = before->index;
      last_mark_ = before->landing_mark;
    } else if (end.landed_us > 0) {
      last_us_ = end.landed_us;  // the rest runs since then
    } else {
      rest_us_ = 0;
    }
  }
  double last_landing_us() const { return std::max(now_us_, last_us_); }
  int lands_last() const { return last_; }  // a row; -1: none is to come
  double landed_us(const Row& row) const {
    const auto found = by_row_.find(row.index);
    return found == by_row_.end() ? now_us_ : found->second;
  }
  double open_us(const Row& row) const {
    if (row.open && row.open->known_done()) return now_us_;
    if (row.open_mark > last_mark_ && end_mark_ > last_mark_ && rest_us_ > 0) {
      const auto marks = static_cast<double>(row.open_mark - last_mark_) - 1, all = static_cast<double>(end_mark_ - last_mark_) - 2;
      return std::max(now_us_, last_us_ + rest_us_ * std::min(1.0, marks / std::max(1.0, all)));
    }
    const auto after = by_mark_.lower_bound(row.open_mark);
    return after == by_mark_.begin() ? now_us_ : std::prev(after)->second;
  }

 private:
  double now_us_, last_us_;  // of the last landing
  double rest_us_;           // from there to the backward's end
  uint64_t last_mark_, end_mark_;
  int last_ = -1;
  std::map<int, double> by_row_;
  std::map<uint64_t, double> by_mark_;
};

bool FlaggedTail::may_be_sent() const {
  if (state_.waiting == 0 || state_.has_failed() || !state_.ahead.empty()) return false;
  const bool foreseen = state_.device->shows_events();
  bool any = !state_.streaming.empty(), lands = false;
  for (const Row& row : state_.rows) {
    if (!row.awaits_copies()) continue;
    if (!row.may_be_flagged(foreseen)) return false;
    lands = lands || is_landing(row);
    any = any || std::any_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) { return !chunk.is_updated(); });
  }
  if (!any || lands) return any;
  // Nobody knows when states may be updated, and by units the lane would stand until the backward's end.
  const Row* last = state_.opens_last();
  return !last || last->open->known_done();
}

// What is still to go: new weights, updated or not, then states.
std::vector<LaneItem> FlaggedTail::items(const Backward& backward, double now_us) const {
  std::vector<LaneItem> items;
  for (const Row& row : state_.rows) {
    if (!row.awaits_copies()) continue;
    const double landed_us = backward.landed_us(row), released_us = std::max(landed_us, backward.open_us(row));
    for (int c = 0; c < row.size(); ++c) {
      const Chunk& chunk = row.chunks[c];
      if (chunk.is(ChunkState::SENT)) continue;
      const auto params = static_cast<double>(chunk.params());
      const double left = params * (chunk.granules() - chunk.finished) / chunk.granules();
      const bool is_there = !chunk.is(ChunkState::AWAITED);
      items.push_back({row.key(c), false, params * static_cast<double>(row.copied_bytes()), left, is_there ? now_us : landed_us, released_us});
    }
  }
  for (const Key& key : state_.streaming) {
    const Row& row = state_.row(key);
    const double open_us = backward.open_us(row);
    for (int c = row.streamed.chunks; c < row.size(); ++c) {
      const auto params = static_cast<double>(row.chunks[c].params());
      items.push_back({row.key(c), true, params * static_cast<double>(row.streamed_bytes()), 0, open_us, open_us});
    }
  }
  return items;
}

// Workers take what has landed in the lane's order. By units, a chunk that lands a little later than
// foreseen would be put off behind all that lands meanwhile, and hold the lane up for as long.
void FlaggedTail::flag(const Key& key, int place) {
  Row& row = state_.row(key);
  Chunk& chunk = state_.chunk(key);
  const bool is_queued = state_.ready.erase(key) > 0;
  row.promised = row.generation;
  chunk.set_state(chunk.is(ChunkState::AWAITED) ? ChunkState::PROMISED : ChunkState::FLAGGED);
  chunk.place = place;
  ++chunk.raised;
  if (is_queued) state_.ready.insert(row.key(key.chunk));
  if (row.flagged++ > 0 || state_.flagged_rows++ > 0) return;
  if (state_.goes_ahead) state_.work_cv.notify_all();  // also those that are left out while updates go ahead (workers.h)
}

std::vector<Upload> FlaggedTail::take(int64_t busy_bytes, int slots, LaneProgress& lane) {
  const double bytes_per_us = rates_.bytes_per_us();
  const double now_us = state_.device->now_us() + static_cast<double>(busy_bytes) / bytes_per_us;
  const Backward backward(state_.rows, state_.backward_end, now_us);
  const std::vector<LaneItem> all = items(backward, now_us);
  const LaneRates rates{state_.clock.params_per_us(), bytes_per_us, rates_.bytes_per_us_in_backward(), backward.last_landing_us()};
  const LaneOrder order = lane_order(all, rates, slots, now_us);
  lane = LaneProgress(order, now_us, backward.last_landing_us());
  lands_last_ = backward.lands_last();
  std::vector<Upload> rest;
  int place = 0, hidden = 0;  // copies, one after the other
  for (size_t i : order.items) {
    const LaneItem& item = all[i];
    const bool is_flagged = !item.is_states && !state_.chunk(item.key).is_updated();
    if (is_flagged) flag(item.key, ++place);
    const bool is_last = rest.size() + 1 == all.size();
    const bool is_shown = item.is_states || item.bytes >= kShownBytes || is_last || ++hidden == kShownApart;
    if (is_shown) hidden = 0;
    const Load load = item.is_states ? Load::STATES : is_flagged ? Load::FLAGGED : Load::WEIGHT;
    rest.push_back({item.key.row, item.key.chunk, load, nullptr, is_shown});
  }
  return rest;
}

bool FlaggedTail::has_room(int64_t places) {
  const double most = kPlacesShare * state_.options.queue_places;
  auto is_free = [&] { return most <= 0 || static_cast<double>(before_.places() + places) < most; };
  if (is_free() || !state_.device->shows_events()) return is_free();  // to ask for events that are not shown may take long
  before_.look(state_.device->now_us());
  return is_free();
}

void FlaggedTail::await_room(LaneProgress& lane, uint64_t commit, EngineLock& lock) {
  follow(lane, commit, [&] { return has_room(lane.places()); }, lock);
}

void FlaggedTail::await_states(LaneProgress& lane, uint64_t commit, EngineLock& lock) {
  follow(lane, commit, [&lane] { return lane.visits() == 0; }, lock);
  rates_.saw(lane, lands_last_ < 0 ? 0 : std::max(0.0, lane.late(state_.rows[lands_last_].landed_us)));
  state_.clock.streamed(state_.device->now_us(), state_.commits - commit);
  following_ = false;
}

template <class Reached>
void FlaggedTail::follow(LaneProgress& lane, uint64_t commit, Reached reached, EngineLock& lock) {
  for (double asked_us = state_.device->now_us(); !state_.stop && !state_.has_failed();) {
    lock.unlock();
    for (LaneProgress* on_lane : {&before_, &lane}) on_lane->look(state_.device->now_us());
    if (!reached()) std::this_thread::sleep_for(kFollowing);
    lock.lock();
    if (reached()) return;
    const double now_us = state_.device->now_us();
    if (following_ && lane.stands() && state_.commits == commit) state_.clock.held(now_us - asked_us);
    asked_us = now_us;
  }
}

void FlaggedTail::await_end(EngineLock& lock) const {
  state_.await(lock, "the last updates of a step had not ended", [this] { return state_.flagged_rows == 0 || state_.has_failed(); });
}

}  // namespace hytrain_fx
