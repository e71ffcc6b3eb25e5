// How states that rest in bf16 are read and written (ir/states.py: `moments`). An update widens
// them, computes as with fp32 states, and rounds what it leaves to one of the two bf16 neighbours
// by chance: the nearer one more often, so that the mean is the fp32 value. Rounding to nearest
// would leave a moment as it is wherever a step changes it by less than half of its last bit.
//
// Chance is a hash of seed, step, parameter and element. So it does not matter who computes an
// update, in which piece, or how often. runtime/rounding.py and update_rows.cu have the same.
#pragma once

#include "formats.h"
#include "random_bits.h"

namespace hytrain_fx {
namespace detail {

// `chance` is uniform in 0..0xFFFF. Exact where the low half of `value` is zero; NaN becomes
// 0x7FC0.
inline uint16_t round_by_chance(float value, uint32_t chance) {
  const uint32_t bits = bits_of_float(value);
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (bits + chance) >> 16);
}

// The first two states of a block that begins where `of` says; null for a second that is not there.
// A third one does not rest in bf16 (ir/states.py).
inline void round_states(const float* __restrict first, uint16_t* __restrict first_out, const float* __restrict second,
                         uint16_t* __restrict second_out, int64_t n, const States& of, const UpdateScalars& scalars) {
  const uint32_t element = of.first, key = scalars.rounding_key ^ of.key;
  if (second_out == nullptr) {
    for (int64_t i = 0; i < n; ++i) first_out[i] = round_by_chance(first[i], random_bits(element + static_cast<uint32_t>(i), key) & 0xFFFFu);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = random_bits(element + static_cast<uint32_t>(i), key);
    first_out[i] = round_by_chance(first[i], bits & 0xFFFFu);
    second_out[i] = round_by_chance(second[i], bits >> 16);
  }
}

// The states of one block as fp32: where they rest, or copies of those that rest in bf16.
class StateBlock {
 public:
  StateBlock(const States& here, int64_t n) : here_(here) {
    for (int s = 0; s < kMaxStates; ++s) {
      at_[s] = static_cast<float*>(here.at[s]);
      if (!here.at[s] || here.width == kWideState) continue;
      at_[s] = copies_[s];
      BF16::widen(static_cast<const uint16_t*>(here.at[s]), at_[s], n);
    }
  }
  float* operator[](int state) const { return at_[state]; }

  void store(int64_t n, const UpdateScalars& scalars) const {
    if (here_.width == kWideState) return;
    round_states(at_[0], static_cast<uint16_t*>(here_.at[0]), at_[1], static_cast<uint16_t*>(here_.at[1]), n, here_, scalars);
  }

 private:
  States here_;
  float* at_[kMaxStates];
  alignas(64) float copies_[kMaxStates][kBlock];
};

}  // namespace detail
}  // namespace hytrain_fx
