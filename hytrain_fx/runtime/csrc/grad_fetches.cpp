#include "grad_fetches.h"

#include "grad_offload.h"

namespace hytrain_fx {
namespace {

struct SlotCopy {  // a gradient on its way back
  char* dst;
  const char* slot;
  int64_t bytes;
};

// Gradients as far apart in `dst` as in their slots are one copy, with the padding between them.
void add_copy(std::vector<SlotCopy>& copies, const SlotCopy& next) {
  if (!copies.empty()) {
    SlotCopy& last = copies.back();
    const int64_t apart = next.dst - last.dst;
    if (apart == padded(last.bytes) && next.slot == last.slot + apart) {
      last.bytes = apart + next.bytes;
      return;
    }
  }
  copies.push_back(next);
}

}  // namespace

uint64_t GradFetches::begin(const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream) {
  std::vector<SlotCopy> copies;
  std::set<EventPtr> landings;
  {
    EngineLock lock(state_.mutex);
    tail_.await_end(lock);
    state_.throw_if_failed();
    int64_t begin = 0;
    for (int i = 0; i < n; ++i) {
      const Row& row = state_.row(rows[i]);  // an update leaves the gradient in the slot
      if (!row.on_host() || !row.landing) throw std::runtime_error(row.name() + " has no gradient to bring back");
      const int64_t bytes = row.spec.numel * row.slot_grad_bytes();
      if (begin + bytes > dst_bytes) throw std::logic_error(row.name() + " does not fit where its gradient is to be brought");
      add_copy(copies, {offset(dst, begin), offset(row.host.slot, 0), bytes});
      landings.insert(row.landing);
      begin += padded(bytes);
    }
  }
  Device& device = *state_.device;
  // Earlier work may still use the memory: allocators hand it out ahead of the stream.
  device.wait(Lane::FETCH, device.record_compute(stream));
  for (const EventPtr& landing : landings) device.wait(Lane::FETCH, landing);
  for (const SlotCopy& copy : copies) device.copy(Lane::FETCH, copy.dst, copy.slot, static_cast<size_t>(copy.bytes));
  EventPtr end = device.record(Lane::FETCH);
  std::lock_guard lock(state_.mutex);
  fetches_[++count_] = last_ = end;
  return count_;
}

void GradFetches::await(uint64_t fetch, void* stream) {
  EventPtr end;
  {
    std::lock_guard lock(state_.mutex);
    const auto found = fetches_.find(fetch);
    if (found == fetches_.end()) throw std::logic_error("fetch " + std::to_string(fetch) + " was never begun, or has been waited for");
    end = found->second;
    fetches_.erase(found);
  }
  state_.device->compute_wait(stream, end);
}

}  // namespace hytrain_fx
