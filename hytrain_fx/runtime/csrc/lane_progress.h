// How far the lane to the device has come with what was put on it at once, and how fast it is. Told by
// what the lane writes behind its copies: the driver is not asked, as it may hold this thread up for
// as long as the launching thread is blocked in it.
#pragma once

#include <deque>
#include <vector>

#include "chunk.h"

namespace hytrain_fx {

struct OnLane {  // one weight, or states of one visit
  EventPtr end;
  int64_t bytes;
  bool is_states, is_shown;
  const Chunk* awaited;  // whose flag the copy waits for; null: none
};

class LaneProgress {
 public:
  // `in_backward`: so many copies are to have come when the backward ends.
  explicit LaneProgress(size_t in_backward) : in_backward_(in_backward) {}
  void add(const OnLane& copy);
  void look(double now_us);
  // It waits for an update by the CPU, and not for the gradient. With the lock held.
  bool stands() const;
  // What has not come: places in the lane's queue, and visits.
  int places() const { return places_; }
  int visits() const { return visits_; }
  // From when the first copy had come until all those of the backward had; 0: not seen.
  double backward_took_us() const { return backward_came_us_ > first_came_us_ ? backward_came_us_ - first_came_us_ : 0; }
  // The median over its streamed states, as some of them stand and wait: those of the backward, and
  // others. 0: too few were seen.
  double backward_bytes_per_us() { return median(backward_rates_); }
  double bytes_per_us() { return median(rates_); }

 private:
  static double median(std::vector<double>& of);

  std::deque<OnLane> rest_;
  int places_ = 0, visits_ = 0;
  size_t in_backward_, came_ = 0;
  double first_came_us_ = 0, backward_came_us_ = 0;
  double last_us_ = 0;
  std::vector<double> backward_rates_, rates_;
};

}  // namespace hytrain_fx
