// AdamW's update of blocks with values whose moments or squares are denormals (denormals.h).
//
// Each operation of adamw.h is written with operands that are none, and rounds as the plain one does,
// so no bit differs. What adds less than a quarter of the last bit is left out. A lane whose values
// are of both sorts at once, such as a first moment of 2^-140 that meets a gradient of 1, is computed
// plainly: slower, never different.
#pragma once

#include "denormals.h"

namespace hytrain_fx {
namespace detail {

constexpr uint32_t kSmallGradient = bits_of_power(-63);    // its square may be a denormal
constexpr uint32_t kSmallerGradient = bits_of_power(-64);  // with a denormal moment, the new one is below 2^-125
constexpr uint32_t kNoGradient = bits_of_power(-80);       // its square is nothing to a second moment
constexpr uint32_t kSmallMoment = bits_of_power(-110);     // moves no weight of kLeastWeight (is_calm)
constexpr uint32_t kLeastWeight = bits_of_power(-50);
constexpr uint32_t kLargeBesideDenormals = bits_of_power(-100);

// Whether a first moment below kSmallMoment moves no weight of kLeastWeight: by 2^-80 at most, where
// a quarter of the last bit is 2^-75.
inline Mask is_calm(const UpdateScalars& s) { return mask_of(s.eps >= 0x1p-30f && std::fabs(s.neg_step_size) <= 1.0f); }

// Whether the ways below hold for these scalars: moments are then means of what is less than 2^-125.
inline bool knows_tiny(const UpdateScalars& s) {
  const bool from_end = (s.flags & kLerpFromEnd) != 0;
  const bool first = from_end ? s.lerp >= -0.5f && s.lerp <= 0.0f : s.lerp >= 0.0f && s.lerp <= 0.5f;
  return first && s.one_minus_beta2 >= 0x1p-40f && s.beta2 >= 0.0f && s.beta2 + s.one_minus_beta2 <= 1.0f + 0x1p-20f;
}

// Whether a block has such values, by its first kLookedAt elements: they seldom come alone.
inline bool has_tiny(const float* __restrict grad, const float* __restrict m, const float* __restrict v, int64_t n) {
  Mask found = 0;
  for (int64_t i = 0; i < std::min(n, kLookedAt); ++i) {
    found |= is_tiny(magnitude_of(grad[i]), kSmallGradient) | is_tiny(magnitude_of(m[i]), kSmallMoment) |
             is_tiny(bits_of_float(v[i]), kLeastNormal);
  }
  return found != 0;
}

// fma(lerp, g - m, kLerpFromEnd ? g : m)
template <bool from_end>
inline float first_moment(float g, float m, float lerp) {
  const uint32_t g_size = magnitude_of(g), m_size = magnitude_of(m);
  const Mask in_units = mask_of(g_size < kHalfNormal) & is_tiny(m_size, kHalfNormal);
  const float g_units = signed_units_of(g_size & in_units, g);
  const float m_units = signed_units_of(m_size & in_units, m);
  const float apart = g_units - m_units, from = from_end ? g_units : m_units;
  const float rounded = std::fma(lerp, apart, from + kSignedUnits) - kSignedUnits;
  const float sign = std::fma(lerp, apart, from);  // that of what rounds to no unit, too
  const float units = with_sign(of_units(std::fabs(rounded)), sign);
  // A denormal gradient changes nothing in g - m where m is 2^-100 or more.
  const Mask alone = from_end ? 0u : mask_of(g_size < kLeastNormal) & mask_of(m_size >= kLargeBesideDenormals);
  const float plain_g = where(~(in_units | alone), g), plain_m = where(~in_units, m);
  return choose(in_units, units, std::fma(lerp, plain_g - plain_m, from_end ? plain_g : plain_m));
}

// fma(one_minus_beta2 * g, g, v * beta2), or as torch's CUDA kernels have it
// fma(one_minus_beta2, g * g, v * beta2)
template <bool torch_cuda>
inline float second_moment(float g, float v, float beta2, float one_minus_beta2) {
  const uint32_t g_size = magnitude_of(g), v_bits = bits_of_float(v);
  const Mask is_small = mask_of(g_size < kSmallGradient);
  const Mask in_units = mask_of(v_bits < kLeastNormal) & mask_of(g_size < kSmallerGradient);
  const float counted = where(mask_of(g_size >= kNoGradient), g);
  // The square of a small gradient is high * low units, less than 2^23.
  const float small = where(is_small, counted);
  const float high = small * 0x1p75f, low = small * 0x1p74f;
  const float square = std::fma(high, low, kWholeUnits) - kWholeUnits;
  const float kept_units = std::fma(units_of(v_bits & in_units), beta2, kWholeUnits);  // and kWholeUnits more
  const float sum = (torch_cuda ? std::fma(one_minus_beta2, square, kept_units) : std::fma(one_minus_beta2 * high, low, kept_units)) - kWholeUnits;
  const float kept = where(~in_units, v) * beta2, alone = where(~in_units, counted);
  const float large = where(~is_small, alone);
  const float plain = torch_cuda ? std::fma(choose(is_small, one_minus_beta2 * 0x1p-75f, one_minus_beta2),
                                            choose(is_small & ~in_units, square * 0x1p-74f, large * large), kept)  // 2^-75 * 2^-74 is a unit
                                 : std::fma(one_minus_beta2 * alone, alone, kept);
  return choose(in_units, float_of_bits(of_units(where(in_units, sum))), plain);
}

inline float root_of(float value) {
  const uint32_t bits = bits_of_float(value);
  const Mask in_units = mask_of(bits < kLeastNormal);
  const float root = std::sqrt(choose(in_units, 2.0f * units_of(bits & in_units), value));
  return root * choose(in_units, 0x1p-75f, 1.0f);  // 2 * 2^-150 is a unit
}

// 0 where the moment moves no weight like this one.
inline float moving(float first, float weight, Mask calm) {
  const Mask still = calm & mask_of(magnitude_of(first) < kSmallMoment) & mask_of(magnitude_of(weight) >= kLeastWeight);
  return where(~still, first);
}

}  // namespace detail
}  // namespace hytrain_fx
