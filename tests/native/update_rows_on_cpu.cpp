// csrc/update_rows.cu as C++, thread by thread, so that its arithmetic and indexing are tested
// without a GPU. CUDA's intrinsics that round to nearest are IEEE operations, as are a CPU's. fp16
// is left out: its conversions are written in PTX.
//
//     g++ -std=c++17 -O2 -ffp-contract=off -shared -fPIC $(python hytrain_fx/ir/limits.py) -I hytrain_fx/runtime/csrc tests/native/update_rows_on_cpu.cpp
#include <cmath>
#include <cstring>

struct Index {
  unsigned int x, y;
};
static Index blockIdx, threadIdx, blockDim, gridDim;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define asm(...) (void)0

static float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

#include "update_rows.cu"

using Kernel = void (*)(hytrain_fx::Rows);

// Runs kernel number `kernel`, as cuda_module.update_functions() lists them, over `count` rows
// with `blocks` blocks of `threads` threads.
extern "C" void run_rows(int kernel, const hytrain_fx::Row* rows, int count, int blocks, int threads) {
  static const Kernel kernels[] = {adamw_rows_f32, adamw_rows_bf16, adamw_rows_f16, adamw_rows_split, adamw_rows_f32_bf16, adamw_rows_split_f32,
                                   lion_rows_f32, lion_rows_bf16, lion_rows_f16, adamw_rows_f32_moments16, adamw_rows_bf16_moments16,
                                   adamw_rows_f16_moments16, adamw_rows_split_moments16, adamw_rows_f32_bf16_moments16,
                                   adamw_rows_split_f32_moments16, lion_rows_f32_moments16, lion_rows_bf16_moments16,
                                   lion_rows_f16_moments16};
  hytrain_fx::Rows packed{};
  std::memcpy(static_cast<void*>(&packed), rows, sizeof(hytrain_fx::Row) * static_cast<size_t>(count));
  gridDim = {static_cast<unsigned int>(blocks), static_cast<unsigned int>(count)};
  blockDim = {static_cast<unsigned int>(threads), 1};
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernels[kernel](packed);
}
