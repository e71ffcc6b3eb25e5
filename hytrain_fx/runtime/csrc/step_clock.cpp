#include "step_clock.h"

#include <algorithm>

namespace hytrain_fx {
namespace {

// Of one unit. What takes longer waited for a full queue, or for the device.
constexpr double kLongestLaunchUs = 5000;

}  // namespace

void StepClock::begin_step(double called_us, double now_us, bool has_ended, bool streams) {
  if (passed_us_ > commit_us_ && called_us - launched_us_ < launched_us_ - passed_us_) {
    finish_.launching_us = launching_us_ + launched_since(called_us);
  }
  told_ = before_ends_ ? before_ : FinishTimes{};
  told_.launching_us = finish_.launching_us;  // known now
  before_ = finish_;
  before_commit_us_ = commit_us_;
  before_ends_ = has_ended && !streams;
  finish_ = {};
  if (workers_busy_us_ > 0) params_per_us_ = static_cast<double>(updated_params_) / workers_busy_us_;
  first_update_us_ = workers_busy_us_ = 0;
  updated_params_ = 0;
  commit_us_ = now_us;
}

void StepClock::streamed(double now_us, uint64_t commits_ago) {
  if (commits_ago == 0) finish_.streamed_us = now_us - commit_us_;
  if (commits_ago != 1) return;
  before_.streamed_us = now_us - before_commit_us_;
  before_ends_ = true;
}

double StepClock::launched_since(double now_us) const { return std::min(now_us - launched_us_, kLongestLaunchUs); }

void StepClock::passed(double now_us) {
  passed_us_ = launched_us_ = now_us;
  launching_us_ = 0;
}

void StepClock::released(double now_us) {
  launching_us_ += launched_since(now_us);
  launched_us_ = now_us;
}

void StepClock::worked(double begin_us, double end_us, int workers, int64_t params) {
  // one ahead of its commit, or late after the one before
  begin_us = std::max(begin_us, commit_us_);
  if (workers_busy_us_ == 0) first_update_us_ = begin_us;
  workers_busy_us_ += (end_us - begin_us) / workers;
  updated_params_ += params;
}

void StepClock::updated(double now_us) {
  finish_.cpu_us = now_us - commit_us_;
  finish_.cpu_paused_us = now_us - first_update_us_ - workers_busy_us_;
  // before the commit: on a guess
  finish_.cpu_begun_us = std::max(first_update_us_ - commit_us_, 0.0);
}

}  // namespace hytrain_fx
