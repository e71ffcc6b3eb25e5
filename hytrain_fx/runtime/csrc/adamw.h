// One AdamW/Adam update whose bits do not depend on who computes it.
//
// Every operation below is one IEEE-754 binary32 operation, rounded to nearest: compiled with
// -ffp-contract=off the compiler may not fuse any of them, and the only fused multiply-adds are the
// ones written as fmaf. update_rows.cu and arithmetic.py write the same expression, so a parameter
// may move between CPU and GPU in mid-training without a changed bit. Denormals are kept.
//
//     g = the gradient, its factors applied (formats.h)
//     p = p * decay                                       decoupled weight decay (AdamW), else 1
//     g = fma(l2, p, g)                                   only with kL2 (Adam)
//     m = fma(lerp, g - m, kLerpFromEnd ? g : m)          torch.lerp
//     v = fma(one_minus_beta2 * g, g, v * beta2)          kTorchCpu    torch.addcmul
//         fma(one_minus_beta2, g * g, v * beta2)          kTorchCuda
//     vmax = max(vmax, v), NaN kept, used as v below      only with kAmsgrad
//     d = sqrt(v) / bias2_sqrt + eps
//     p = p + (neg_step_size * m) / d                     kTorchCpu    torch.addcdiv
//         fma(neg_step_size, m / d, p)                    kTorchCuda
//
// The two forms are what torch's CPU kernels (AVX2 or AVX-512) and torch's CUDA foreach kernels
// compute. Either runs on either device.
#pragma once

#include "adamw_tiny.h"

namespace hytrain_fx {
namespace detail {

// One block of the update; the flags are template arguments so that the loop has no branch and
// vectorises. With `tiny` each operation is the one of adamw_tiny.h.
template <uint32_t flags, bool tiny>
inline void update_values(const float* __restrict grad, float* __restrict p, float* __restrict m, float* __restrict v, float* __restrict vmax,
                          int64_t n, const UpdateScalars& scalars) {
  const UpdateScalars s = scalars;  // a copy, so that stores to p, m, v cannot alias it
  const Mask calm = is_calm(s);
  for (int64_t i = 0; i < n; ++i) {
    const float weight = p[i] * s.decay;
    const float g = (flags & kL2) ? std::fma(s.l2, weight, grad[i]) : grad[i];
    const float first =
        tiny ? first_moment<(flags & kLerpFromEnd) != 0>(g, m[i], s.lerp) : std::fma(s.lerp, g - m[i], (flags & kLerpFromEnd) ? g : m[i]);
    float second;
    if (tiny) {
      second = second_moment<(flags & kTorchCuda) != 0>(g, v[i], s.beta2, s.one_minus_beta2);
    } else {
      const float kept = v[i] * s.beta2;
      second = (flags & kTorchCuda) ? std::fma(s.one_minus_beta2, g * g, kept) : std::fma(s.one_minus_beta2 * g, g, kept);
    }
    float used = second;
    if (flags & kAmsgrad) {
      const float largest = vmax[i];  // torch.maximum: a NaN on either side stays
      used = (second > largest || second != second) ? second : largest;
      vmax[i] = used;
    }
    const float denominator = (tiny ? root_of(used) : std::sqrt(used)) / s.bias2_sqrt + s.eps;
    const float moves = tiny ? moving(first, weight, calm) : first;
    m[i] = first;
    v[i] = second;
    p[i] = (flags & kTorchCuda) ? std::fma(s.neg_step_size, moves / denominator, weight) : weight + (s.neg_step_size * moves) / denominator;
  }
}

template <uint32_t flags>
inline void update_block(const float* __restrict grad, float* __restrict p, float* __restrict m, float* __restrict v, float* __restrict vmax,
                         int64_t n, const UpdateScalars& scalars) {
  if (has_tiny(grad, m, v, n) && knows_tiny(scalars)) return update_values<flags, true>(grad, p, m, v, vmax, n, scalars);
  update_values<flags, false>(grad, p, m, v, vmax, n, scalars);
}

template <uint32_t index>
constexpr uint32_t flags_at() {  // four bits: kAmsgrad, kL2, kLerpFromEnd, kTorchCuda
  return index << 1;
}

inline UpdateBlock adamw_block_for(uint32_t flags) {
  static constexpr UpdateBlock table[16] = {
      update_block<flags_at<0>()>,  update_block<flags_at<1>()>,  update_block<flags_at<2>()>,  update_block<flags_at<3>()>,
      update_block<flags_at<4>()>,  update_block<flags_at<5>()>,  update_block<flags_at<6>()>,  update_block<flags_at<7>()>,
      update_block<flags_at<8>()>,  update_block<flags_at<9>()>,  update_block<flags_at<10>()>, update_block<flags_at<11>()>,
      update_block<flags_at<12>()>, update_block<flags_at<13>()>, update_block<flags_at<14>()>, update_block<flags_at<15>()>,
  };
  return table[(flags >> 1) & 15u];
}

}  // namespace detail
}  // namespace hytrain_fx
