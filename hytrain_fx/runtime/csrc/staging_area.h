// Device memory that streamed states pass through, in slots of one chunk.
#pragma once

#include <array>
#include <vector>

#include "device.h"
#include "locks.h"
#include "native_structs.h"

namespace hytrain_fx {

struct StagingSlot {
  std::array<float*, 1 + kMaxStates> at{};  // a master and its states
  EventPtr stored;     // the slot is free after it
  uint64_t visit = 0;  // number of the last
};

class StagingArea {
 public:
  // Uses other memory from now on; no row is in flight. Called without the lock, which is `mutex`.
  void set(const StagingMemory& memory, EngineMutex& mutex);

  bool is_empty() const { return slots_.empty(); }
  int size() const { return static_cast<int>(slots_.size()); }
  // Null where all are in use, as far as is known.
  StagingSlot* free_slot();
  // The one whose last visit ends first, though it may not have ended.
  StagingSlot* next_slot();
  void begin_visit(StagingSlot& slot) { slot.visit = ++visits_; }
  const std::vector<StagingSlot>& slots() const { return slots_; }

 private:
  std::vector<StagingSlot> slots_;
  uint64_t visits_ = 0;
};

}  // namespace hytrain_fx
