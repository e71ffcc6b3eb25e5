// The times of a step: when its updates began and ended, and how long launching took (FinishTimes).
//
// A step counts from its commit to the next. All times are of the device's clock, in microseconds.
#pragma once

#include "native_structs.h"

namespace hytrain_fx {

class StepClock {
 public:
  // A commit: it was called at `called_us` and begins at `now_us`. Of the step before, `has_ended`:
  // every update is on its way; `streams`: its last states are still on the lane. Its times are told
  // at the next commit, when these have come too. They are told then in any case: of steps that are
  // now on time and now late only those on time would tell.
  void begin_step(double called_us, double now_us, bool has_ended, bool streams);
  // The launching thread: a wait() for an update has returned, a release() was called after it.
  void passed(double now_us);
  void released(double now_us);
  // Workers: one of `workers` was busy; an update by the CPU has ended.
  void worked(double begin_us, double end_us, int workers, int64_t params);
  void updated(double now_us);
  // The uploader: the last states are on the device, or on their way, of the step whose commit was
  // the last one or so many before; the lane stood still before them.
  void streamed(double now_us, uint64_t commits_ago = 0);
  void held(double us) { finish_.streamed_held_us += us; }
  void ran_ahead() { ++finish_.ahead; }
  void sent_at_once(int64_t params, bool promised) {
    finish_.at_once += params;
    finish_.promised += promised ? params : 0;
  }

  // of the CPU in the step before, all workers together; 0: not known
  double params_per_us() const { return params_per_us_; }
  const FinishTimes& last() const { return told_; }

 private:
  double launched_since(double now_us) const;

  double commit_us_ = 0;                     // of the last commit
  // of the last wait() for an update, and of it or the last release() after
  double passed_us_ = 0, launched_us_ = 0;
  // from one to the other, without what held the launching thread up
  double launching_us_ = 0;
  // since the last commit: begin of the first update by the CPU
  double first_update_us_ = 0;
  double workers_busy_us_ = 0;               // since then: workers' time over their number
  int64_t updated_params_ = 0;               // by them
  double params_per_us_ = 0;
  // Of the last commit, as far as it has come, and of the one before, which the next tells. Told.
  FinishTimes finish_{}, before_{}, told_{};
  double before_commit_us_ = 0;
  bool before_ends_ = false;
};

}  // namespace hytrain_fx
