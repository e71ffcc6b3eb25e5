// One Lion update, like adamw.h for AdamW: every operation rounds once, and none is fused.
// runtime/lion.py and update_rows.cu have the same.
//
//     g = the gradient, its factors applied (formats.h)
//     c = m * beta1 + g * (1 - beta1)
//     p = p * decay + (-lr, 0 or lr by the sign of c)      decay = 1 - lr * weight_decay;
//                                                          torch.sign: 0 for 0 and NaN
//     m = m * beta2 + g * (1 - beta2)
#pragma once

#include "formats.h"

namespace hytrain_fx {
namespace detail {

inline void lion_block(const float* __restrict grad, float* __restrict p, float* __restrict m, float*, float*, int64_t n,
                       const UpdateScalars& scalars) {
  const UpdateScalars s = scalars;
  for (int64_t i = 0; i < n; ++i) {
    const float direction = m[i] * s.beta1 + grad[i] * s.lerp;
    // -0: nothing is added, not even to -0
    const float step = direction > 0.0f ? s.neg_step_size : direction < 0.0f ? -s.neg_step_size : -0.0f;
    m[i] = m[i] * s.beta2 + grad[i] * s.one_minus_beta2;
    p[i] = p[i] * s.decay + step;
  }
}

}  // namespace detail
}  // namespace hytrain_fx
