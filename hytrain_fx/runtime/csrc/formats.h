// What updates by the CPU read and write: gradients and weights of three formats, a block at a
// time, and a row's states.
//
// For gradients: g = grad * factor_0 ... factor_k, each product rounded to grad's dtype, with
// kWideFactors to binary32; -g with kMaximize.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "update_scalars.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace hytrain_fx {

enum class Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr int32_t kWideState = 4;

// A row's states besides its master, in the order of ir/states.py; null for those it does not have.
// `width` is the bytes of an element: 4 is fp32, 2 is bf16, for all of them. What rounding by chance
// takes (rounding.h): the number of the first element in its parameter, and the parameter's key.
struct States {
  void* at[kMaxStates];
  int32_t width = kWideState;
  uint32_t first = 0;
  uint32_t key = 0;

  int count() const {
    int found = 0;
    for (const void* state : at) found += state != nullptr;
    return found;
  }
  States from(int64_t begin) const {
    States found = *this;
    for (void*& state : found.at) state = state ? static_cast<char*>(state) + begin * width : nullptr;
    found.first += static_cast<uint32_t>(begin);
    return found;
  }
};

namespace detail {

// Elements between the stages of one block, which meet in L1. Short blocks keep memory and
// arithmetic overlapped: with 1024 elements instead of 64 the kernel loses 20% from DRAM. The
// prefetch covers what the hardware's own loses at each page border.
constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 16-bit formats: conversion of one block. `widen` is exact, `narrow` rounds to nearest even.
struct BF16 {
  static float widen1(uint16_t half) { return float_of_bits(uint32_t{half} << 16); }
  // Not vcvtneps2bf16, which flushes denormals. NaN becomes 0x7FC0 as in c10::BFloat16.
  static uint16_t narrow1(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
  static void widen(const uint16_t* __restrict in, float* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = widen1(in[i]);
  }
  static void narrow(const float* __restrict in, uint16_t* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = narrow1(in[i]);
  }
  static void round(float* values, float factor, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values[i] = widen1(narrow1(values[i] * factor));
  }
};

struct F16 {
#if defined(__F16C__)
  static float widen1(uint16_t half) { return _cvtsh_ss(half); }
  static uint16_t narrow1(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
  static float widen1(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    if (magnitude >= 0x7C00u) return float_of_bits(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
    if (magnitude >= 0x0400u) return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
    const float denormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
    return float_of_bits(sign | bits_of_float(denormal));
  }
  static uint16_t narrow1(float value) {
    const uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    // 65520 and more: inf
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    // Below 2^-14: adding 0.5 puts the last half-precision bit at the last bit of the sum.
    if (magnitude < 0x38800000u) {
      const uint32_t sum = bits_of_float(float_of_bits(magnitude) + 0.5f);
      return static_cast<uint16_t>(sign | (sum - 0x3F000000u));
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
  }
#endif
  static void widen(const uint16_t* __restrict in, float* __restrict out, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < n; ++i) out[i] = widen1(in[i]);
  }
  static void narrow(const float* __restrict in, uint16_t* __restrict out, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) out[i] = narrow1(in[i]);
  }
  static void round(float* values, float factor, int64_t n) {
    uint16_t half[kBlock];
    for (int64_t i = 0; i < n; ++i) values[i] *= factor;
    narrow(values, half, n);
    widen(half, values, n);
  }
};

inline void multiply(float* g, int64_t n, const UpdateScalars& s) {
  for (uint32_t k = 0; k < s.factor_count; ++k)
    for (int64_t i = 0; i < n; ++i) g[i] *= s.factors[k];
}

// Gradient of one block as fp32, its factors applied, negated for maximize (exact in every dtype).
template <class Format>
inline void read_gradient16(const uint16_t* grad, float* g, int64_t n, const UpdateScalars& s) {
  Format::widen(grad, g, n);
  if (s.flags & kWideFactors) return multiply(g, n, s);
  for (uint32_t k = 0; k < s.factor_count; ++k) Format::round(g, s.factors[k], n);
}

inline void read_gradient(const void* grad, Dtype dtype, int64_t start, float* __restrict g, int64_t n, const UpdateScalars& s) {
  if (dtype == Dtype::kBF16) {
    read_gradient16<BF16>(static_cast<const uint16_t*>(grad) + start, g, n, s);
  } else if (dtype == Dtype::kF16) {
    read_gradient16<F16>(static_cast<const uint16_t*>(grad) + start, g, n, s);
  } else {
    std::memcpy(g, static_cast<const float*>(grad) + start, static_cast<size_t>(n) * sizeof(float));
    multiply(g, n, s);
  }
  if (s.flags & kMaximize)
    for (int64_t i = 0; i < n; ++i) g[i] = -g[i];
}

inline void write_weight(const float* p, void* out, Dtype dtype, int64_t start, int64_t n) {
  if (dtype == Dtype::kBF16) {
    BF16::narrow(p, static_cast<uint16_t*>(out) + start, n);
  } else if (dtype == Dtype::kF16) {
    F16::narrow(p, static_cast<uint16_t*>(out) + start, n);
  } else {
    std::memcpy(static_cast<float*>(out) + start, p, static_cast<size_t>(n) * sizeof(float));
  }
}

// A kernel's update of one block: fp32 gradients, masters, and the states' arrays.
using UpdateBlock = void (*)(const float*, float*, float*, float*, float*, int64_t, const UpdateScalars&);

}  // namespace detail
}  // namespace hytrain_fx
