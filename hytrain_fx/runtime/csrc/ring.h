// Device memory through which gradients pass on their way to the host: handed out in order, reused in order.
//
// Handing out never blocks the host: the compute stream is made to wait for the copies that still read the memory.
#pragma once

#include <deque>

#include "device.h"

namespace hytrain_fx {

class Ring {
 public:
  Ring(void* base, size_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}

  size_t largest() const { return bytes_ / 2 / kAlign * kAlign; }

  // Memory for `bytes` (at most largest()), free as soon as the compute stream has passed this point.
  void* take(size_t bytes, Device& device, void* stream) {
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    if (bytes > largest()) throw std::logic_error("internal: a piece larger than half of the ring");
    if (head_ + bytes > bytes_) {
      while (!used_.empty() && used_.front().begin >= head_) wait_for_front(device, stream);
      head_ = 0;
    }
    size_t begin = head_, end = head_ + bytes;
    while (!used_.empty() && used_.front().begin < end && used_.front().end > begin) wait_for_front(device, stream);
    head_ = end;
    used_.push_back({begin, end, nullptr});
    return base_ + begin;
  }

  // The memory last taken is free again after `event`.
  void free_after(const EventPtr& event) { used_.back().event = event; }

 private:
  static constexpr size_t kAlign = 512;
  struct Region {
    size_t begin, end;
    EventPtr event;
  };
  void wait_for_front(Device& device, void* stream) {
    device.compute_wait(stream, used_.front().event);
    used_.pop_front();
  }
  char* base_;
  size_t bytes_;
  size_t head_ = 0;
  std::deque<Region> used_;
};

}  // namespace hytrain_fx
