// One Lion update, like adamw.h for AdamW: every operation rounds once, and none is fused.
// runtime/lion.py and update_rows.cu have the same.
//
//     g = the gradient, its factors applied (formats.h)
//     c = m * beta1 + g * (1 - beta1)
//     p = p * decay + (-lr, 0 or lr by the sign of c)      decay = 1 - lr * weight_decay;
//                                                          torch.sign: 0 for 0 and NaN
//     m = m * beta2 + g * (1 - beta2)
//
// A lane whose m and g are denormals is computed in units (denormals.h).
#pragma once

#include "denormals.h"

namespace hytrain_fx {
namespace detail {

// value * factor, rounded to whole units: of a value in units, with its sign even where none is left.
inline float rounded_units(float units, float factor) {
  const float product = std::fma(units, factor, kSignedUnits) - kSignedUnits;
  return with_sign(magnitude_of(product), units);
}

// a * x + b * y, for values in units where `in_units`, and then in units.
inline float lion_sum(float x, float a, float y, float b, Mask in_units) {
  const float in_whole = rounded_units(where(in_units, x), a) + rounded_units(where(in_units, y), b);
  return choose(in_units, in_whole, where(~in_units, x) * a + where(~in_units, y) * b);
}

// Without `tiny` no lane is in units, and the compiler leaves out all that is for those.
template <bool tiny>
inline void lion_values(const float* __restrict grad, float* __restrict p, float* __restrict m, int64_t n, const UpdateScalars& scalars) {
  const UpdateScalars s = scalars;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t g_size = magnitude_of(grad[i]), m_size = magnitude_of(m[i]);
    const Mask in_units = tiny ? mask_of(g_size < kHalfNormal) & is_tiny(m_size, kHalfNormal) : 0u;
    const float g = choose(in_units, signed_units_of(g_size & in_units, grad[i]), grad[i]);
    const float before = choose(in_units, signed_units_of(m_size & in_units, m[i]), m[i]);
    const float direction = lion_sum(before, s.beta1, g, s.lerp, in_units);
    // -0: nothing is added, not even to -0
    const float step = direction > 0.0f ? s.neg_step_size : direction < 0.0f ? -s.neg_step_size : -0.0f;
    const float average = lion_sum(before, s.beta2, g, s.one_minus_beta2, in_units);
    m[i] = choose(in_units, with_sign(of_units(std::fabs(where(in_units, average))), average), average);
    p[i] = p[i] * s.decay + step;
  }
}

inline void lion_block(const float* __restrict grad, float* __restrict p, float* __restrict m, float*, float*, int64_t n,
                       const UpdateScalars& scalars) {
  Mask found = 0;
  for (int64_t i = 0; i < std::min(n, kLookedAt); ++i) found |= is_tiny(magnitude_of(m[i]), kHalfNormal);
  const auto is_share = [](float beta) { return !std::signbit(beta) && beta <= 1.0f; };
  if (found != 0 && is_share(scalars.beta1) && is_share(scalars.beta2)) return lion_values<true>(grad, p, m, n, scalars);
  lion_values<false>(grad, p, m, n, scalars);
}

}  // namespace detail
}  // namespace hytrain_fx
