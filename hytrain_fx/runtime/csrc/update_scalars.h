// The scalars of one step as C++, CUDA (NVRTC and nvcc) and scalars.ScalarsStruct see them; each
// kernel reads those that it knows. No includes but of our own: NVRTC has none.
#pragma once

#include "shared_limits.h"

namespace hytrain_fx {

enum UpdateFlags : unsigned int {
  kMaximize = 1u << 0,
  kAmsgrad = 1u << 1,      // the vmax pointer must be given
  kL2 = 1u << 2,           // Adam with weight decay
  kLerpFromEnd = 1u << 3,  // 1 - beta1 >= 0.5: torch.lerp then counts from the end
  // the form of torch's CUDA foreach kernels, else of its CPU kernels (adamw.h)
  kTorchCuda = 1u << 4,
  // a 16-bit gradient is widened first: factors multiply it in fp32, without rounding
  kWideFactors = 1u << 5,
};

enum class Kernel : unsigned int { kAdamw = 0, kLion = 1 };  // ir/states.py

struct UpdateScalars {
  float decay;                // 1 - lr * weight_decay, or 1
  float l2;                   // weight_decay with kL2, else 0
  float lerp;                 // w = 1 - beta1, or w - 1 with kLerpFromEnd (never Lion's)
  float beta2;
  float one_minus_beta2;
  float neg_step_size;        // -lr / (1 - beta1^step); Lion's is -lr
  float bias2_sqrt;           // sqrt(1 - beta2^step)
  float eps;
  unsigned int flags;         // UpdateFlags
  unsigned int factor_count;  // 0..kMaxFactors: multiplications of the gradient, in order
  float factors[kMaxFactors];
  unsigned int kernel;        // Kernel
  float beta1;                // Lion
  unsigned int rounding_key;  // of seed and step, for states in 16 bits (random_bits.h)
};
static_assert(sizeof(UpdateScalars) == 68, "mirrored in Python");

}  // namespace hytrain_fx
