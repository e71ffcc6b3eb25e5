// How far the lane to the device has come with what was put on it at once, and how fast it is. Told by
// what the lane writes behind its copies: the driver is not asked, as it may hold this thread up for
// as long as the launching thread is blocked in it.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "chunk.h"
#include "lane_order.h"

namespace hytrain_fx {

struct OnLane {  // one weight, or states of one visit
  EventPtr end;
  int64_t bytes;
  int64_t places;
  bool is_states, is_shown;
  const Chunk* awaited;  // whose flag the copy waits for; null: none
};

// The backward ends, here, as its last gradient lands: until then gradients share the host's memory.
class LaneProgress {
 public:
  LaneProgress() = default;
  // `began_us`: the time that the order was planned for; `ends_us`: when the backward was to end.
  LaneProgress(const LaneOrder& order, double began_us, double ends_us)
      : in_backward_(order.in_backward), planned_us_(order.planned_us), began_us_(began_us), ends_us_(ends_us) {}
  void add(const OnLane& copy);
  void add(const LaneProgress& other);  // what has not come of it
  void look(double now_us);
  // It waits for an update by the CPU, and not for the gradient. With the lock held.
  bool stands() const;
  // What has not come: places in the lane's queue, and visits.
  int64_t places() const { return places_; }
  int visits() const { return visits_; }
  // For what was to come before the backward's end. Took: 0 where it has not come.
  double planned_us() const { return planned_us_; }
  double took_us() const { return took_us_; }
  // The backward's time as a share of what was planned, if it has ended then.
  double late(double ended_us) const { return (ended_us - began_us_) / std::max(ends_us_ - began_us_, 1.0); }
  // The median over streamed states that were to come later, as some of them stand and wait. 0: too
  // few were seen, or no weight was with them: then nobody knows when the backward ends.
  double bytes_per_us() const;

 private:
  std::deque<OnLane> rest_;
  int64_t places_ = 0;
  int visits_ = 0;
  bool has_weights_ = false;
  size_t in_backward_ = 0, came_ = 0;
  double planned_us_ = 0, took_us_ = 0, began_us_ = 0, ends_us_ = 0, last_us_ = 0;
  std::vector<double> rates_;
};

// The lane's rates in the steps to come. Beside gradients on their way to the host it is slower: by
// how much is learnt from how long all took that was to come before the backward's end. Otherwise the
// lane would be behind its plan there, and what the forward needs first, whose gradient comes last,
// would stand behind all that it needs later.
//
// How fast copies follow one another in a backward does not tell: most wait there for a gradient. And
// where the lane has time to spare, it is late or early as gradients are. What these explain teaches
// nothing of how slow it is. Other causes may stay for many steps, so the rate has limits. It goes back to that after
// the backward where little is to come before.
//
// What is planned for a slow lane takes as long on a fast one, as its copies wait for gradients. So a
// faster one is tried now and then, and more seldom after each trial that put the lane behind.
class LearntRates {
 public:
  double bytes_per_us() const;  // after the backward
  double bytes_per_us_in_backward() const { return in_backward_ > 0 ? in_backward_ : bytes_per_us(); }
  // `late`: of the backward; 0: not known, as where it had ended before.
  void saw(const LaneProgress& lane, double late);

 private:
  static constexpr int kLeastApart = 8;
  double slower(double rate, double longer);
  double faster(double rate, double longer);

  double after_ = 0, in_backward_ = 0;  // 0: not known
  double tried_ = 0, before_trial_ = 0;  // by how much more than planned; the rate before
  int until_ = 0, apart_ = kLeastApart;  // steps without a trial: until the next, and after one that failed
};

}  // namespace hytrain_fx
