// Whether a gradient is finite: every later weight of a row would be NaN otherwise.
#pragma once

#include <cstdint>

#include "adamw.h"

namespace hytrain_fx {

// Whether none of n values has all exponent bits set, as infinities and NaN have.
template <class Bits>
bool all_below(const void* values, int64_t n, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(values);
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= static_cast<Bits>((bits[i] & exponent) == exponent);
  return bad == 0;
}

inline bool all_finite(const void* values, Dtype dtype, int64_t n) {
  switch (dtype) {
    case Dtype::kF32: return all_below<uint32_t>(values, n, 0x7F800000u);
    case Dtype::kBF16: return all_below<uint16_t>(values, n, 0x7F80u);
    default: return all_below<uint16_t>(values, n, 0x7C00u);
  }
}

}  // namespace hytrain_fx
