#include "staging_area.h"

#include <algorithm>

namespace hytrain_fx {

void StagingArea::set(const StagingMemory& memory, EngineMutex& mutex) {
  std::vector<StagingSlot> slots;
  {
    std::lock_guard lock(mutex);
    slots = slots_;
  }
  for (const StagingSlot& slot : slots) {  // no row is in flight: nobody begins another visit
    if (slot.stored) slot.stored->sync();
  }
  std::lock_guard lock(mutex);
  slots_.assign(memory.slots, {});
  for (int s = 0; s < memory.slots; ++s) {
    for (int a = 0; a < memory.arrays; ++a) slots_[s].at[a] = memory.base + (s * memory.arrays + a) * memory.slot_params;
  }
}

StagingSlot* StagingArea::free_slot() {
  for (StagingSlot& slot : slots_) {
    if (!slot.stored || slot.stored->known_done()) return &slot;
  }
  return nullptr;
}

StagingSlot* StagingArea::next_slot() {
  return &*std::min_element(slots_.begin(), slots_.end(), [](const auto& a, const auto& b) { return a.visit < b.visit; });
}

}  // namespace hytrain_fx
