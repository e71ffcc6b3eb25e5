// The limits that C++ and CUDA share with Python. Their values are definitions, which
// hytrain_fx/ir/limits.py prints and build.py passes on; limits.py explains each. There are no
// includes for NVRTC, which has none.
#pragma once

#ifndef HYTRAIN_FX_CHUNK_PARAMS
#error "no limits: compile with the definitions that `python hytrain_fx/ir/limits.py` prints"
#endif

#ifndef __CUDACC_RTC__
#include <cstdint>

namespace hytrain_fx {

#ifdef HYTRAIN_FX_SMALL_CHUNKS  // scripts/race_check: as many tasks of few parameters
constexpr int64_t kChunk = 1 << 10, kGranule = 256, kLeastGuessed = 300;
#else
constexpr int64_t kChunk = HYTRAIN_FX_CHUNK_PARAMS;
constexpr int64_t kGranule = HYTRAIN_FX_GRANULE_PARAMS;
constexpr int64_t kLeastGuessed = HYTRAIN_FX_LEAST_GUESSED_PARAMS;
#endif
constexpr int64_t kCacheLineBytes = HYTRAIN_FX_CACHE_LINE_BYTES;
constexpr int64_t kShadowApartBytes = HYTRAIN_FX_SHADOW_APART_BYTES;
constexpr double kLongestWaitS = HYTRAIN_FX_LONGEST_WAIT_S;

}  // namespace hytrain_fx
#endif

namespace hytrain_fx {

constexpr int kMaxFactors = HYTRAIN_FX_MAX_FACTORS;
constexpr int kMaxStates = HYTRAIN_FX_MAX_STATES;
constexpr int kUpdateKernels = HYTRAIN_FX_UPDATE_KERNELS;
constexpr int kRowsPerLaunch = HYTRAIN_FX_ROWS_PER_LAUNCH;
constexpr int kPartsPerGather = HYTRAIN_FX_PARTS_PER_GATHER;
constexpr int kBlockThreads = HYTRAIN_FX_CUDA_BLOCK_THREADS;
constexpr int kBlockElements = HYTRAIN_FX_CUDA_BLOCK_ELEMENTS;

}  // namespace hytrain_fx
