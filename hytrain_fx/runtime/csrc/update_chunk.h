// One update of a range of a row by the CPU, whatever its kernel: gradient in, master and states in
// place, new weight out.
#pragma once

#include "adamw.h"
#include "lion.h"
#include "rounding.h"

namespace hytrain_fx {
namespace detail {

// The kernels by number (ir/states.py).
inline UpdateBlock block_of(const UpdateScalars& scalars) {
  switch (static_cast<Kernel>(scalars.kernel)) {
    case Kernel::kAdamw: return adamw_block_for(scalars.flags);
    case Kernel::kLion: return lion_block;
  }
  return nullptr;
}

// Whether the lines will be written to: otherwise a store to a line fetched for reading asks for it
// again.
template <int writes>
[[gnu::always_inline]] inline void prefetch_lines(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kCacheLineBytes) __builtin_prefetch(static_cast<const char*>(from) + at, writes);
}

// The first two: a third one is rare.
template <int writes>
[[gnu::always_inline]] inline void prefetch_states(const States& states, int64_t start) {
  for (int s = 0; s < 2; ++s) {
    if (states.at[s]) prefetch_lines<writes>(static_cast<const char*>(states.at[s]) + start * states.width, kBlock * states.width);
  }
}

// Inlined by force, like every function that only prefetches: GCC takes a call of such a function
// for a call without effect, and drops it.
[[gnu::always_inline]] inline void prefetch_block(const void* grad, Dtype dtype, const float* p, const States& states, int64_t start) {
  const int64_t grad_bytes = dtype == Dtype::kF32 ? 4 : 2;
  const char* lines = static_cast<const char*>(grad) + start * grad_bytes;
  for (int64_t at = 0; at < kBlock * grad_bytes; at += kCacheLineBytes) __builtin_prefetch(lines + at, 1);
  for (int64_t i = start; i < start + kBlock; i += kCacheLineBytes / 4) __builtin_prefetch(p + i, 1);
  prefetch_states<1>(states, start);
}

}  // namespace detail

// Updates n parameters in one pass on the calling thread. Reads grad; master (fp32) and states
// in place; writes the new weight to `out` unless null. `out` may be the memory of `grad` (same
// start, same element size): a block is read before it is written. No other two arrays may overlap.
// No alignment is needed.
inline void update_chunk(const void* grad, Dtype grad_dtype, float* master, const States& states, void* out, Dtype out_dtype, int64_t n,
                         const UpdateScalars& scalars) {
  const detail::UpdateBlock update = detail::block_of(scalars);
  alignas(64) float g[detail::kBlock];
  for (int64_t start = 0; start < n; start += detail::kBlock) {
    const int64_t count = n - start < detail::kBlock ? n - start : detail::kBlock;
    const int64_t ahead = start + detail::kAhead;
    if (ahead + detail::kBlock <= n) detail::prefetch_block(grad, grad_dtype, master, states, ahead);
    detail::read_gradient(grad, grad_dtype, start, g, count, scalars);
    const detail::StateBlock here(states.from(start), count);
    update(g, master + start, here[0], here[1], here[2], count, scalars);
    here.store(count, scalars);
    if (out != nullptr) detail::write_weight(master + start, out, out_dtype, start, count);
  }
}

}  // namespace hytrain_fx
