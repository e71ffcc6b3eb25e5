#include "lane_progress.h"

#include <algorithm>
#include <cmath>

namespace hytrain_fx {
namespace {

constexpr size_t kLeastRates = 5;
constexpr double kGuessedBytesPerUs = 25e3;
// What is too short, or nearly as planned, tells nothing; and no step alone tells much.
constexpr double kLeastPlannedUs = 5e3, kLeastChange = 0.03, kMostChange = 0.3, kTrust = 0.5;
// A faster lane is tried after steps that were not behind, more in each further one. Once it is behind,
// so much is taken back, at most all of the trial: less than kLeastChange behind is not seen.
constexpr double kTriedMore = 0.01, kTriedMost = 0.1, kTriedBack = 0.15;
constexpr int kMostApart = 64;
constexpr double kLeastShare = 1.0 / 16;  // in the backward, of the rate after it

}  // namespace

void LaneProgress::add(const OnLane& copy) {
  rest_.push_back(copy);
  places_ += copy.places;
  visits_ += copy.is_states;
  has_weights_ = has_weights_ || !copy.is_states;
}

void LaneProgress::add(const LaneProgress& other) {
  for (const OnLane& copy : other.rest_) add(copy);
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
    places_ -= came.places;
    visits_ -= came.is_states;
  }
  if (!any) return;
  if (took_us_ == 0 && came_ >= in_backward_) took_us_ = now_us - began_us_;
  if (has_states && came_ > in_backward_ && last_us_ > 0 && now_us > last_us_) rates_.push_back(bytes / (now_us - last_us_));
  last_us_ = now_us;
}

bool LaneProgress::stands() const {
  // A small weight that is not shown may have come long ago: what is behind it is where the lane is.
  const auto at = std::find_if(rest_.begin(), rest_.end(), [](const OnLane& copy) {
    return copy.is_shown || (copy.awaited && !copy.awaited->is_updated());
  });
  return at != rest_.end() && at->awaited && at->awaited->is(ChunkState::FLAGGED);
}

double LaneProgress::bytes_per_us() const {
  if (rates_.size() < kLeastRates || !has_weights_) return 0;
  std::vector<double> of = rates_;
  std::nth_element(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2), of.end());
  return of[of.size() / 2];
}

double LearntRates::bytes_per_us() const { return after_ > 0 ? after_ : kGuessedBytesPerUs; }

double LearntRates::slower(double rate, double longer) {
  if (tried_ == 0) {
    until_ = std::max(until_, kLeastApart);
    return rate / (1 + kTrust * std::min(longer, kMostChange));
  }
  tried_ = 0;
  until_ = apart_ = std::min(2 * apart_, kMostApart);
  return std::max(before_trial_, (1 - kTriedBack) * rate);
}

double LearntRates::faster(double rate, double longer) {
  if (rate >= bytes_per_us()) {
    tried_ = 0;
  } else if (until_ > 0) {
    --until_;
  } else {
    tried_ = std::min(tried_ + kTriedMore, kTriedMost);
  }
  if (tried_ == kTriedMore) before_trial_ = rate;
  if (tried_ == kTriedMost) apart_ = kLeastApart;
  const double shorter = -kTrust * std::max(longer, -kMostChange);
  return rate * (1 + std::max(tried_, shorter < kTrust * kLeastChange ? 0 : shorter));
}

void LearntRates::saw(const LaneProgress& lane, double late) {
  double rate = bytes_per_us_in_backward();
  if (lane.bytes_per_us() > 0) after_ = lane.bytes_per_us();
  if (late > 0 && (lane.planned_us() < kLeastPlannedUs || lane.took_us() <= 0)) {
    rate += kTrust * (bytes_per_us() - rate);
    tried_ = 0;
  } else if (late > 0) {
    const double took = lane.took_us() / lane.planned_us();
    const double longer = took / std::clamp(took, std::min(late, 1.0), std::max(late, 1.0)) - 1;
    rate = longer >= kLeastChange ? slower(rate, longer) : faster(rate, longer);
  }
  in_backward_ = std::clamp(rate, kLeastShare * bytes_per_us(), bytes_per_us());
}

}  // namespace hytrain_fx
