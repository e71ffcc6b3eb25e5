// The kernels' chunks under C names, for tests and benchmarks (ctypes).
#include "split_chunk.h"

extern "C" {

// Layout of `grad`, `out` and dtypes as in update_chunk.h. Returns 0, or 1 when kAmsgrad is set
// without a third state.
int hytrain_fx_update_chunk(const void* grad, int32_t grad_dtype, float* master, const hytrain_fx::States* states, void* out,
                            int32_t out_dtype, int64_t n, const hytrain_fx::UpdateScalars* scalars) {
  if ((scalars->flags & hytrain_fx::kAmsgrad) != 0 && states->at[2] == nullptr && n > 0) return 1;
  hytrain_fx::update_chunk(grad, static_cast<hytrain_fx::Dtype>(grad_dtype), master, *states, out,
                           static_cast<hytrain_fx::Dtype>(out_dtype), n, *scalars);
  return 0;
}

// Like update_split_chunk in split_chunk.h; the flags are not checked.
void hytrain_fx_update_split_chunk(const void* grad, int32_t grad_dtype, uint16_t* high, uint16_t* low,
                                   const hytrain_fx::States* states, int64_t n, const hytrain_fx::UpdateScalars* scalars) {
  hytrain_fx::update_split_chunk(grad, static_cast<hytrain_fx::Dtype>(grad_dtype), high, low, *states, n, *scalars);
}

}  // extern "C"
