#include "lane_progress.h"

#include <algorithm>

namespace hytrain_fx {
namespace {

constexpr size_t kLeastRates = 5;

// Of a weight: waits for its flag and for its last reader, the copy, an event, and a word behind it. Of
// states: two waits, a copy for a master and for each of them, an event and a word.
int places_of(const OnLane& copy) { return copy.is_states ? 5 + kMaxStates : 3 + copy.is_shown + (copy.awaited != nullptr); }

}  // namespace

void LaneProgress::add(const OnLane& copy) {
  rest_.push_back(copy);
  places_ += places_of(copy);
  visits_ += copy.is_states;
}

void LaneProgress::look(double now_us) {
  double bytes = 0;
  bool any = false, has_states = false;
  for (; !rest_.empty() && rest_.front().end->seen(); rest_.pop_front()) {
    const OnLane& came = rest_.front();
    any = true;
    ++came_;
    bytes += static_cast<double>(came.bytes);
    has_states = has_states || came.is_states;
    places_ -= places_of(came);
    visits_ -= came.is_states;
  }
  if (!any) return;
  if (first_came_us_ == 0) first_came_us_ = now_us;
  if (backward_came_us_ == 0 && came_ >= in_backward_) backward_came_us_ = now_us;
  if (has_states && last_us_ > 0 && now_us > last_us_) {
    (came_ > in_backward_ ? rates_ : backward_rates_).push_back(bytes / (now_us - last_us_));
  }
  last_us_ = now_us;
}

bool LaneProgress::stands() const {
  // A small weight that is not shown may have come long ago: what is behind it is where the lane is.
  const auto at = std::find_if(rest_.begin(), rest_.end(), [](const OnLane& copy) {
    return copy.is_shown || (copy.awaited && !copy.awaited->is_updated());
  });
  return at != rest_.end() && at->awaited && at->awaited->is(ChunkState::FLAGGED);
}

double LaneProgress::median(std::vector<double>& of) {
  if (of.size() < kLeastRates) return 0;
  std::nth_element(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2), of.end());
  return of[of.size() / 2];
}

}  // namespace hytrain_fx
