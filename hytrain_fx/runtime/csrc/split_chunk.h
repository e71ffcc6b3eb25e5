// update_chunk for bf16 rows whose fp32 master rests in two halves, so that an update moves 28
// bytes a parameter instead of 30 and a visit to the device 22 instead of 24 (with fp32 states):
//
//     high   the bf16 weight: the master rounded to nearest even, what goes to the device anyway
//     low    the low 16 bits of the master
//
// (high, low) keep all bits of a master except one: where low is 0x8000, a tie, rounding to even
// hides whether it went up. Where it did, the sign of state number kTieState is set, a state that
// is never negative. Every finite master and infinity come back bit for bit; a NaN stays a NaN.
#pragma once

#include "update_chunk.h"

namespace hytrain_fx {

constexpr int kTieState = 1;  // ir/states.py: marks_ties

namespace detail {

inline void join_master(const uint16_t* __restrict high, const uint16_t* __restrict low, const float* __restrict v, float* __restrict p,
                        float* __restrict positive_v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t marked = bits_of_float(v[i]), tail = low[i];
    const uint32_t went_up = (tail > 0x8000u) | ((tail == 0x8000u) & (marked >> 31));
    p[i] = float_of_bits(((high[i] - went_up) << 16) | tail);
    positive_v[i] = float_of_bits(marked & 0x7FFFFFFFu);
  }
}

inline void split_master(const float* __restrict p, const float* __restrict positive_v, uint16_t* __restrict high, uint16_t* __restrict low,
                         float* __restrict v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of_float(p[i]), odd = (bits >> 16) & 1u, tail = bits & 0xFFFFu;
    high[i] = BF16::narrow1(p[i]);
    low[i] = static_cast<uint16_t>(tail);
    v[i] = float_of_bits((bits_of_float(positive_v[i]) & 0x7FFFFFFFu) | (((tail == 0x8000u) & odd) << 31));
  }
}

[[gnu::always_inline]] inline void prefetch_split_block(const void* grad, Dtype grad_dtype, const uint16_t* high, const uint16_t* low,
                                                        const States& states, int64_t start) {
  const int64_t grad_bytes = grad_dtype == Dtype::kF32 ? 4 : 2;
  const char* lines = static_cast<const char*>(grad) + start * grad_bytes;
  for (int64_t at = 0; at < kBlock * grad_bytes; at += kCacheLineBytes) __builtin_prefetch(lines + at, 0);
  for (int64_t i = start; i < start + kBlock; i += kCacheLineBytes / 2) {
    __builtin_prefetch(high + i, 1);
    __builtin_prefetch(low + i, 1);
  }
  prefetch_states<1>(states, start);
}

// `count` parameters from `start`, at most kBlock of them; arguments as in update_split_chunk().
[[gnu::always_inline]] inline void split_block(const void* grad, Dtype grad_dtype, uint16_t* high, uint16_t* low, const States& states,
                                               int64_t start, int64_t count, const UpdateScalars& scalars, UpdateBlock update) {
  alignas(64) float g[kBlock], p[kBlock], positive_v[kBlock];
  read_gradient(grad, grad_dtype, start, g, count, scalars);
  const StateBlock here(states.from(start), count);
  float* const marked = here[kTieState];
  join_master(high + start, low + start, marked, p, positive_v, count);
  update(g, p, here[0], positive_v, here[2], count, scalars);
  split_master(p, positive_v, high + start, low + start, marked, count);
  here.store(count, scalars);
}

}  // namespace detail

// Updates n parameters in one pass on the calling thread. Reads `grad`, bf16 or fp32; updates high,
// low and states in place, `high` being the new weight. No two arrays may overlap. No alignment is
// needed.
inline void update_split_chunk(const void* grad, Dtype grad_dtype, uint16_t* high, uint16_t* low, const States& states, int64_t n,
                               const UpdateScalars& scalars) {
  const detail::UpdateBlock update = detail::block_of(scalars);
  int64_t start = 0;
  // a length that the compiler knows: faster
  for (; start + detail::kBlock <= n; start += detail::kBlock) {
    const int64_t ahead = start + detail::kAhead;
    if (ahead + detail::kBlock <= n) detail::prefetch_split_block(grad, grad_dtype, high, low, states, ahead);
    detail::split_block(grad, grad_dtype, high, low, states, start, detail::kBlock, scalars, update);
  }
  if (start < n) detail::split_block(grad, grad_dtype, high, low, states, start, n - start, scalars, update);
}

}  // namespace hytrain_fx
