#include "shadow_arena.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hytrain_fx {
namespace {

constexpr int64_t kArrayBytes = kGranule * static_cast<int64_t>(sizeof(float)) + kShadowApartBytes;

// In a slot: the master or its upper half, and after that the lower half; then the states, one
// array each.
constexpr int64_t kLowAt = kArrayBytes / 2 / kCacheLineBytes * kCacheLineBytes;

}  // namespace

void ShadowArena::set(const ShadowMemory& memory) {
  if (slots_ > 0) throw std::logic_error("the engine has shadow memory already");
  if (memory.arrays < 1 || memory.arrays > 1 + kMaxStates) throw std::out_of_range("arrays in a shadow slot: expected 1 to " + std::to_string(1 + kMaxStates));
  arrays_ = memory.arrays;
  for (int64_t s = memory.bytes / slot_bytes() - 1; s >= 0; --s) free_.push_back(memory.base + s * slot_bytes());
  slots_ = free_.size();
}

bool ShadowArena::suits(const Row& row) const {
  if (slots_ == 0 || row.spec.numel < kLeastGuessed || 1 + row.host.states.count() > arrays_) return false;
  // a new weight apart from its master has no other place
  return row.weight_bytes() == 4 || row.host.low;
}

int64_t ShadowArena::slot_bytes() const { return arrays_ * kArrayBytes; }

char* ShadowArena::take() {
  char* slot = free_.back();
  free_.pop_back();
  most_bytes_ = std::max(most_bytes_, static_cast<int64_t>(slots_ - free_.size()) * slot_bytes());
  return slot;
}

void ShadowArena::settle(Chunk& chunk, bool updated) {
  for (Shadow& shadow : chunk.shadows) {
    if (!shadow.slot) continue;
    if (updated) shadow.holds = !shadow.holds;
    if (shadow.holds) continue;
    free_.push_back(shadow.slot);
    shadow.slot = nullptr;
  }
  chunk.guessed = 0;
}

HostArrays arrays_in(const HostArrays& home, char* slot) {
  HostArrays found{home.low ? reinterpret_cast<uint16_t*>(slot + kLowAt) : nullptr, home.states};
  for (int s = 0; s < kMaxStates; ++s) {
    if (home.states.at[s]) found.states.at[s] = slot + (1 + s) * kArrayBytes;
  }
  return found;
}

}  // namespace hytrain_fx
