// Denormals, the numbers below 2^-126, as whole numbers of their unit, 2^-149. x86 computes with
// denormals in microcode: an operation that reads or gives one takes 150 cycles, and an update of a
// block of them ten times as long. They are no rarity. The first moment of a row of an embedding that
// no batch uses any more is below 2^-126 within 900 steps, and stays there for good, as 0.9 * 4 units
// rounds to 4.
//
// The number of units is a float like any other. A product or a sum is rounded to whole units by
// adding kWholeUnits or kSignedUnits to its exact value, in a fused multiply-add, and taking it away.
#pragma once

#include <algorithm>

#include "formats.h"

namespace hytrain_fx {
namespace detail {

constexpr uint32_t bits_of_power(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kLeastNormal = bits_of_power(-126);
constexpr uint32_t kHalfNormal = kLeastNormal / 2;  // 2^-127
constexpr int64_t kLookedAt = 16;  // elements of a block, to see whether it has such values
constexpr float kWholeUnits = 0x1p23f;     // of 0 up to as much
constexpr float kSignedUnits = 0x1.8p23f;  // of up to 2^22 of either sign

// Conditions are masks of all bits or none, and choices are bit operations: GCC 12 does not vectorise
// a loop with that many conditional expressions.
using Mask = uint32_t;
inline Mask mask_of(bool holds) { return 0u - static_cast<uint32_t>(holds); }
inline uint32_t magnitude_of(float value) { return bits_of_float(value) & ~kSign; }
inline float where(Mask holds, float value) { return float_of_bits(bits_of_float(value) & holds); }  // else 0
inline float choose(Mask holds, float value, float other) {
  return float_of_bits((bits_of_float(value) & holds) | (bits_of_float(other) & ~holds));
}

// Below the limit, and not zero, which is no trouble.
inline Mask is_tiny(uint32_t magnitude, uint32_t limit) { return mask_of(magnitude - 1u < limit - 1u); }

// A denormal, or 0, as a number of units, and back.
inline float units_of(uint32_t magnitude) { return static_cast<float>(static_cast<int32_t>(magnitude)); }
inline uint32_t of_units(float units) { return static_cast<uint32_t>(static_cast<int32_t>(units)); }
inline float with_sign(uint32_t magnitude, float sign) { return float_of_bits(magnitude | (bits_of_float(sign) & kSign)); }
inline float signed_units_of(uint32_t magnitude, float sign) { return with_sign(bits_of_float(units_of(magnitude)), sign); }

}  // namespace detail
}  // namespace hytrain_fx
