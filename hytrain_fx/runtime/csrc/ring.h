// Device memory through which gradients pass on their way to the host: handed out in order, reused
// in order.
//
// Handing out never blocks the host: the compute stream is made to wait for the copies that still
// read the memory.
#pragma once

#include <deque>

#include "device.h"

namespace hytrain_fx {

class Ring {
 public:
  Ring(void* base, size_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}

  // The most that take() gives at once; it leaves room for the next while the last is still read.
  size_t largest() const { return bytes_ / kAlign * kAlign; }
  size_t half() const { return bytes_ / 2 / kAlign * kAlign; }

  // Uses other memory from now on, once nothing is on its way through the present one. What the
  // compute stream still does to that is in order.
  void move_to(void* base, size_t bytes) {
    for (const Region& region : used_) recorded(region.event, "ring").sync();
    used_.clear();
    base_ = static_cast<char*>(base);
    bytes_ = bytes;
    head_ = 0;
  }

  // Memory for `bytes` (at most largest()), free as soon as the compute stream has passed this
  // point.
  void* take(size_t bytes, Device& device, void* stream) {
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    if (bytes > largest()) throw std::logic_error("internal: a piece larger than the ring");
    EventPtr last;
    if (head_ + bytes > bytes_) {
      while (!used_.empty() && used_.front().begin >= head_) last = pop_front();
      head_ = 0;
    }
    size_t begin = head_, end = head_ + bytes;
    while (!used_.empty() && used_.front().begin < end && used_.front().end > begin) last = pop_front();
    if (last) device.compute_wait(stream, last);
    head_ = end;
    used_.push_back({begin, end, nullptr});
    return base_ + begin;
  }

  // The memory last taken is free again after `event`. All such events are on one lane, so the
  // latest stands for all.
  void free_after(const EventPtr& event) { used_.back().event = event; }

 private:
  static constexpr size_t kAlign = 512;
  struct Region {
    size_t begin, end;
    EventPtr event;
  };
  EventPtr pop_front() {
    EventPtr event = used_.front().event;
    recorded(event, "ring");
    used_.pop_front();
    return event;
  }
  char* base_;
  size_t bytes_;
  size_t head_ = 0;
  std::deque<Region> used_;
};

}  // namespace hytrain_fx
