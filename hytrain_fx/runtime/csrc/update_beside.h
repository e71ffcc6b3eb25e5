// update_chunk and update_split_chunk (same bits) for states that are written to another place than
// they are read from. This includes the low halves of masters, where those are in halves. Stores
// bypass the caches, since a plain store to another place would read the line first. So as many
// bytes move as in place. Masters, or their high halves, are updated in place; what they were can
// be kept.
#pragma once

#include "split_chunk.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hytrain_fx {

struct HostArrays {  // a row's states on the host, without masters
  uint16_t* low;     // null: masters are whole
  States states;
};

// Bypasses the caches; call store_fence() before another thread may read it.
inline void stream_copy(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(out) % 64 == 0) {
    for (; bytes >= 64; bytes -= 64, out += 64, in += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
  }
#elif defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    for (; bytes >= 16; bytes -= 16, out += 16, in += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    }
  }
#endif
  std::memcpy(out, in, static_cast<size_t>(bytes));
}

inline void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

namespace detail {

[[gnu::always_inline]] inline void prefetch_beside(const void* grad, int64_t grad_width, const char* master, int64_t master_width,
                                                   const HostArrays& from, int64_t start) {
  prefetch_lines<0>(static_cast<const char*>(grad) + start * grad_width, kBlock * grad_width);
  prefetch_lines<1>(master + start * master_width, kBlock * master_width);
  if (from.low) prefetch_lines<0>(from.low + start, kBlock * 2);
  prefetch_states<0>(from.states, start);
}

// `count` parameters from `start`, at most kBlock of them; arguments as in update_beside().
[[gnu::always_inline]] inline void beside_block(const void* grad, Dtype grad_dtype, char* weight, char* kept, const HostArrays& from,
                                                const HostArrays& to, int64_t start, int64_t count, const UpdateScalars& scalars,
                                                UpdateBlock update) {
  const int64_t master_width = from.low ? 2 : 4;
  const States source = from.states.from(start), target = to.states.from(start);
  alignas(64) float g[kBlock], p[kBlock], marked[kBlock], states[kMaxStates][kBlock];
  alignas(64) uint16_t low[kBlock], rounded[2][kBlock];
  const bool wide = source.width == kWideState;
  read_gradient(grad, grad_dtype, start, g, count, scalars);
  for (int s = 0; s < kMaxStates; ++s) {
    if (!source.at[s]) continue;
    if (!wide) {
      BF16::widen(static_cast<const uint16_t*>(source.at[s]), from.low && s == kTieState ? marked : states[s], count);
    } else if (!from.low || s != kTieState) {
      std::memcpy(states[s], source.at[s], static_cast<size_t>(count) * sizeof(float));
    }
  }
  if (kept) stream_copy(kept, weight, count * master_width);
  if (from.low) {
    const float* const with_signs = wide ? static_cast<const float*>(source.at[kTieState]) : marked;
    join_master(reinterpret_cast<const uint16_t*>(weight), from.low + start, with_signs, p, states[kTieState], count);
  } else {
    std::memcpy(p, weight, static_cast<size_t>(count) * sizeof(float));
  }
  update(g, p, states[0], source.at[1] ? states[1] : nullptr, source.at[2] ? states[2] : nullptr, count, scalars);
  if (from.low) {
    split_master(p, states[kTieState], reinterpret_cast<uint16_t*>(weight), low, marked, count);
    stream_copy(to.low + start, low, count * static_cast<int64_t>(sizeof(uint16_t)));
  } else {
    std::memcpy(weight, p, static_cast<size_t>(count) * sizeof(float));
  }
  float* const second = from.low ? marked : states[kTieState];
  if (!wide) {
    round_states(states[0], rounded[0], second, target.at[1] ? rounded[1] : nullptr, count, source, scalars);
    for (int s = 0; s < 2; ++s) {
      if (target.at[s]) stream_copy(target.at[s], rounded[s], count * target.width);
    }
    return;
  }
  for (int s = 0; s < kMaxStates; ++s) {
    if (target.at[s]) stream_copy(target.at[s], s == kTieState ? second : states[s], count * target.width);
  }
}

}  // namespace detail

// `master`: fp32, or with `from.low` the bf16 halves that are the weight. `kept` receives what they
// were, null for nothing. `to` has the arrays that `from` has. No two arrays may overlap; each
// 64-byte aligned, or it is slow.
inline void update_beside(const void* grad, Dtype grad_dtype, void* master, void* kept, const HostArrays& from, const HostArrays& to, int64_t n,
                          const UpdateScalars& scalars) {
  const detail::UpdateBlock update = detail::block_of(scalars);
  const int64_t grad_width = grad_dtype == Dtype::kF32 ? 4 : 2, master_width = from.low ? 2 : 4;
  const auto kept_at = [&](int64_t start) { return kept ? static_cast<char*>(kept) + start * master_width : nullptr; };
  char* const weights = static_cast<char*>(master);
  int64_t start = 0;
  // a length that the compiler knows: a fifth faster
  for (; start + detail::kBlock <= n; start += detail::kBlock) {
    const int64_t ahead = start + detail::kAhead;
    if (ahead + detail::kBlock <= n) detail::prefetch_beside(grad, grad_width, weights, master_width, from, ahead);
    detail::beside_block(grad, grad_dtype, weights + start * master_width, kept_at(start), from, to, start, detail::kBlock, scalars, update);
  }
  if (start < n) {
    detail::beside_block(grad, grad_dtype, weights + start * master_width, kept_at(start), from, to, start, n - start, scalars, update);
  }
  store_fence();
}

}  // namespace hytrain_fx
