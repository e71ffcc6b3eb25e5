// Several copies within the device in one launch: a unit's gradients into the ring. Bytes only, no
// arithmetic.
//
// Kernel `gather`, launched with cuLaunchKernel: one parameter, `Parts` by value; grid (x, number
// of parts), block (kBlockThreads, 1, 1), any x.
#include "shared_limits.h"

using hytrain_fx::kPartsPerGather;

struct Parts {
  void* dst[kPartsPerGather];
  const void* src[kPartsPerGather];
  // any number of 2-byte elements; dst is aligned to 64, src to 2
  long long bytes[kPartsPerGather];
};

extern "C" __global__ void __launch_bounds__(hytrain_fx::kBlockThreads) gather(const Parts parts) {
  const int part = blockIdx.y;
  char* dst = static_cast<char*>(parts.dst[part]);
  const char* src = static_cast<const char*>(parts.src[part]);
  const long long bytes = parts.bytes[part];
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const bool aligned = (reinterpret_cast<unsigned long long>(src) & 15) == 0;
  const long long words = aligned ? bytes / 16 : 0;
  for (long long i = thread; i < words; i += threads) reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<const uint4*>(src)[i];
  for (long long i = words * 8 + thread; i < bytes / 2; i += threads) {
    reinterpret_cast<unsigned short*>(dst)[i] = reinterpret_cast<const unsigned short*>(src)[i];
  }
}
