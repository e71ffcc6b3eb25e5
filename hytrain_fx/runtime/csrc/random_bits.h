// 32 random bits for each element of a parameter in a step. No includes: NVRTC has none.
//
// The hash is triple32 of C. Wellons ("Prospecting for Hash Functions", 2018), with a key of step
// and parameter after the first product. For one key it is a bijection of the elements' numbers, and
// for one element one of the keys, so each half of the bits is uniform.
#pragma once

#ifdef __CUDACC__
#define HYTRAIN_FX_ANYWHERE __host__ __device__ __forceinline__
#else
#define HYTRAIN_FX_ANYWHERE inline
#endif

namespace hytrain_fx {

HYTRAIN_FX_ANYWHERE unsigned int random_bits(unsigned int element, unsigned int key) {
  unsigned int x = element;
  x ^= x >> 17;
  x *= 0xED5AD4BBu;
  x ^= key;
  x ^= x >> 11;
  x *= 0xAC4C1B51u;
  x ^= x >> 15;
  x *= 0x31848BABu;
  x ^= x >> 14;
  return x;
}

}  // namespace hytrain_fx
