// Other memory for the states of rows that are updated on a guess: shadow slots, of one granule
// each.
//
// Such an update reads the states where they are and writes them to the other place: from home to
// the slot, and in a later step from the slot home. After a right guess they are in the new place,
// after a wrong one they are where they were. So nothing is copied to be kept, nothing is copied
// back, and an update moves as many bytes as in place. Only masters stay at home, since weights
// leave from there; meanwhile the slot keeps what they were. drain() carries all states home, for
// whoever reads them there (homeward.h).
#pragma once

#include <vector>

#include "native_structs.h"
#include "row.h"

namespace hytrain_fx {

class ShadowArena {
 public:
  void set(const ShadowMemory& memory);  // once

  // Whether the row can be updated on a guess, and that is worth its shadows.
  bool suits(const Row& row) const;
  bool is_empty() const { return free_.empty(); }
  char* take();
  void give(char* slot) { free_.push_back(slot); }
  // All granules of the chunk were updated, or none counts.
  void settle(Chunk& chunk, bool updated);
  int64_t most_bytes() const { return most_bytes_; }  // that were taken at once

 private:
  int64_t slot_bytes() const;

  std::vector<char*> free_;
  size_t slots_ = 0;
  int32_t arrays_ = 0;  // in each
  int64_t most_bytes_ = 0;
};

// The arrays in a slot for those that are at `home`. First in it is what masters were, whole or
// their upper half.
HostArrays arrays_in(const HostArrays& home, char* slot);

}  // namespace hytrain_fx
