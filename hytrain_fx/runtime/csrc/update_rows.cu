// The kernels on the GPU (adamw.h): the same expressions, each operation an intrinsic that rounds
// to nearest and is never contracted, denormals kept.
//
// Several rows in one launch, as the engine updates a unit: each launch and each event takes a
// place in the stream's queue, and a full queue blocks the launching thread. Kernels, by the dtypes
// of gradient and weight:
//
//     adamw_rows_f32, adamw_rows_bf16, adamw_rows_f16   both the same; an f32 weight is the master
//     adamw_rows_f32_bf16                               bf16 weights with fp32 gradients
//     adamw_rows_split, adamw_rows_split_f32            bf16 weights with masters in two halves,
//                                                       gradients bf16 or fp32
//     lion_rows_f32, lion_rows_bf16, lion_rows_f16      both the same
//
// and each with `_moments16` after it: states in bf16, rounded by chance (rounding.h).
//
// Launched without the CUDA runtime (cuLaunchKernel): one parameter, `Rows` by value; block
// (kBlockThreads, 1, 1), no shared memory, grid (any x, number of rows); ceil(n / kBlockElements)
// blocks in x is a good number. No array may overlap another, but out may be grad where both have
// the same dtype.
#include "random_bits.h"
#include "update_scalars.h"

namespace hytrain_fx {

using Bits16 = unsigned short;
// elements a thread takes at once: 16 bytes of a 16-bit array, 2 x 16 of fp32
constexpr int kVector = 8;

template <int count>
struct alignas(16) Words {
  unsigned int at[count];
};

struct F32 {
  using Storage = float;
  static __device__ float widen(float x) { return x; }
  static __device__ float narrow(float x) { return x; }
};

struct BF16 {
  using Storage = Bits16;
  static __device__ float widen(Bits16 x) { return __uint_as_float(static_cast<unsigned int>(x) << 16); }
  static __device__ Bits16 narrow(float x) {
    const unsigned int bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<Bits16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct F16 {
  using Storage = Bits16;
  static __device__ float widen(Bits16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  static __device__ Bits16 narrow(float x) {
    Bits16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
};

// What a row asks for, looked at in each element.
struct AnyForm {
  const UpdateScalars& s;
  __device__ bool has(unsigned int flag) const { return s.flags & flag; }
  __device__ bool has_factor(unsigned int k) const { return k < s.factor_count; }
};

// AdamW in torch's CUDA form and no more, known when this is compiled: half as many instructions.
// They bind where states are in bf16. With fp32 states memory binds, and an H200 updated 121 to 128
// G parameters a second this way instead of 134: those kernels do without it.
struct UsualForm {
  static constexpr unsigned int flags = kTorchCuda;
  const UpdateScalars& s;
  static __device__ bool is_of(const UpdateScalars& s) { return s.flags == flags && s.factor_count == 0; }
  __device__ constexpr bool has(unsigned int flag) const { return flags & flag; }
  __device__ constexpr bool has_factor(unsigned int) const { return false; }
};

template <class Grad, class Form>
__device__ __forceinline__ float read_gradient(typename Grad::Storage grad, Form form) {
  float g = Grad::widen(grad);
#pragma unroll
  for (unsigned int k = 0; k < kMaxFactors; ++k)
    if (form.has_factor(k)) {
      const float product = __fmul_rn(g, form.s.factors[k]);
      g = form.has(kWideFactors) ? product : Grad::widen(Grad::narrow(product));
    }
  return form.has(kMaximize) ? -g : g;
}

// How states rest. `chance` is 16 uniform bits.
struct Wide {
  using Storage = float;
  static __device__ float widen(float x) { return x; }
  static __device__ float round(float x, unsigned int) { return x; }
  static __device__ unsigned int bits(unsigned int, unsigned int) { return 0; }
};

struct Narrow {  // rounding.h
  using Storage = Bits16;
  static __device__ float widen(Bits16 x) { return BF16::widen(x); }
  static __device__ Bits16 round(float x, unsigned int chance) {
    const unsigned int bits = __float_as_uint(x);
    return static_cast<Bits16>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (bits + chance) >> 16);
  }
  static __device__ unsigned int bits(unsigned int element, unsigned int key) { return random_bits(element, key); }
};

// What a kernel does to one element, and which states it has besides the first. The letters are
// those of adamw.h.
struct AdamW {
  static constexpr bool has_second = true;
  template <class Form>
  static __device__ bool has_third(Form form) {
    return form.has(kAmsgrad);
  }
  template <class Form>
  static __device__ __forceinline__ void update(float g, float& p, float& m, float& v, float& vmax, Form form) {
    const UpdateScalars& s = form.s;
    const float weight = __fmul_rn(p, s.decay);
    if (form.has(kL2)) g = __fmaf_rn(s.l2, weight, g);
    m = __fmaf_rn(s.lerp, __fadd_rn(g, -m), form.has(kLerpFromEnd) ? g : m);
    const float kept = __fmul_rn(v, s.beta2);
    v = form.has(kTorchCuda) ? __fmaf_rn(s.one_minus_beta2, __fmul_rn(g, g), kept) : __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, kept);
    float used = v;
    if (form.has(kAmsgrad)) {
      used = (v > vmax || v != v) ? v : vmax;
      vmax = used;
    }
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(used), s.bias2_sqrt), s.eps);
    p = form.has(kTorchCuda) ? __fmaf_rn(s.neg_step_size, __fdiv_rn(m, denominator), weight)
                             : __fadd_rn(weight, __fdiv_rn(__fmul_rn(s.neg_step_size, m), denominator));
  }
};

struct Lion {  // lion.h
  static constexpr bool has_second = false;
  template <class Form>
  static __device__ bool has_third(Form) {
    return false;
  }
  template <class Form>
  static __device__ __forceinline__ void update(float g, float& p, float& m, float&, float&, Form form) {
    const UpdateScalars& s = form.s;
    const float direction = __fadd_rn(__fmul_rn(m, s.beta1), __fmul_rn(g, s.lerp));
    m = __fadd_rn(__fmul_rn(m, s.beta2), __fmul_rn(g, s.one_minus_beta2));
    p = __fadd_rn(__fmul_rn(p, s.decay), direction > 0.0f ? s.neg_step_size : direction < 0.0f ? -s.neg_step_size : -0.0f);
  }
};

template <class T>
union Pack {
  T value[kVector];
  Words<4> words[kVector * sizeof(T) / 16];
  __device__ Pack() {}
  __device__ void load(const T* from) {
#pragma unroll
    for (int k = 0; k < static_cast<int>(kVector * sizeof(T) / 16); ++k) words[k] = reinterpret_cast<const Words<4>*>(from)[k];
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int k = 0; k < static_cast<int>(kVector * sizeof(T) / 16); ++k) reinterpret_cast<Words<4>*>(to)[k] = words[k];
  }
};

__device__ __forceinline__ bool aligned(const void* pointer) { return (reinterpret_cast<unsigned long long>(pointer) & 15u) == 0; }

// A master in two halves (split_chunk.h): `high` is the bf16 weight, `low` the rest of its bits.
// The sign of `v` tells which way a tie went.
__device__ __forceinline__ float join_master(Bits16 high, Bits16 low, float& v) {
  const unsigned int marked = __float_as_uint(v), tail = low;
  const unsigned int went_up = (tail > 0x8000u) | ((tail == 0x8000u) & (marked >> 31));
  v = __uint_as_float(marked & 0x7FFFFFFFu);
  return __uint_as_float(((high - went_up) << 16) | tail);
}

__device__ __forceinline__ void split_master(float p, Bits16& high, Bits16& low, float& v) {
  const unsigned int bits = __float_as_uint(p), odd = (bits >> 16) & 1u, tail = bits & 0xFFFFu;
  high = BF16::narrow(p);
  low = static_cast<Bits16>(tail);
  v = __uint_as_float((__float_as_uint(v) & 0x7FFFFFFFu) | (((tail == 0x8000u) & odd) << 31));
}

struct Row {
  const void* grad;
  void* master;              // fp32; split kernels: `low`, the other half of the weight
  void* states[kMaxStates];  // in the order of ir/states.py; null for those that it does not have
  void* out;                 // the new weight; split kernels read it too, others take null for none
  long long n;
  UpdateScalars scalars;     // their key for rounding is the parameter's too
  unsigned int first;        // number of the first element, for rounding
  // not null and not zero there: the row stays unchanged (the loss scale was too large)
  const float* skip;
};

// One element's states as fp32 for an update. A third state is fp32 always (ir/states.py).
template <class State>
struct Moments {
  float m, v, vmax;
  __device__ Moments(typename State::Storage first, typename State::Storage second, float third)
      : m(State::widen(first)), v(State::widen(second)), vmax(third) {}
  __device__ void leave(typename State::Storage& first, typename State::Storage& second, float& third, unsigned int bits) const {
    first = State::round(m, bits & 0xFFFFu);
    second = State::round(v, bits >> 16);
    third = vmax;
  }
};

// For kernels whose second state marks ties.
template <class Form, class Step, class Grad, class State>
__device__ __forceinline__ void update_split(const Row& r) {
  using Stored = typename State::Storage;
  const UpdateScalars& s = r.scalars;
  const Form form{s};
  const auto* grad = static_cast<const typename Grad::Storage*>(r.grad);
  auto *low = static_cast<Bits16*>(r.master), *high = static_cast<Bits16*>(r.out);
  auto *m = static_cast<Stored*>(r.states[0]), *v = static_cast<Stored*>(r.states[1]);
  auto* vmax = static_cast<float*>(r.states[2]);
  const bool third = Step::has_third(form);
  const bool vectors = aligned(grad) && aligned(low) && aligned(m) && aligned(v) && aligned(vmax) && aligned(high);
  const long long thread = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long threads = gridDim.x * static_cast<long long>(blockDim.x);
  const long long whole = vectors ? r.n / kVector : 0;
  auto update = [&](typename Grad::Storage g, Bits16& high1, Bits16& low1, Stored& m1, Stored& v1, float& vmax1, long long at) {
    Moments<State> moments(m1, v1, vmax1);
    float p = join_master(high1, low1, moments.v);
    Step::update(read_gradient<Grad>(g, form), p, moments.m, moments.v, moments.vmax, form);
    split_master(p, high1, low1, moments.v);
    moments.leave(m1, v1, vmax1, State::bits(r.first + static_cast<unsigned int>(at), s.rounding_key));
  };
  for (long long i = thread; i < whole; i += threads) {
    const long long at = i * kVector;
    Pack<typename Grad::Storage> gs;
    Pack<Bits16> highs, lows;
    Pack<Stored> ms, vs;
    Pack<float> vmaxs;
    gs.load(grad + at);
    highs.load(high + at);
    lows.load(low + at);
    ms.load(m + at);
    vs.load(v + at);
    if (third) vmaxs.load(vmax + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) update(gs.value[k], highs.value[k], lows.value[k], ms.value[k], vs.value[k], vmaxs.value[k], at + k);
    highs.store(high + at);
    lows.store(low + at);
    ms.store(m + at);
    vs.store(v + at);
    if (third) vmaxs.store(vmax + at);
  }
  for (long long i = whole * kVector + thread; i < r.n; i += threads) {
    float largest = third ? vmax[i] : 0.0f;
    update(grad[i], high[i], low[i], m[i], v[i], largest, i);
    if (third) vmax[i] = largest;
  }
}

template <class Form, class Step, class Grad, class Out, class State>
__device__ __forceinline__ void update_whole(const Row& r) {
  using Stored = typename State::Storage;
  const UpdateScalars s = r.scalars;
  const Form form{s};
  const auto* grad = static_cast<const typename Grad::Storage*>(r.grad);
  auto* p = static_cast<float*>(r.master);
  auto* out = static_cast<typename Out::Storage*>(r.out);
  auto *m = static_cast<Stored*>(r.states[0]), *v = static_cast<Stored*>(r.states[1]);
  auto* vmax = static_cast<float*>(r.states[2]);
  const bool third = Step::has_third(form);
  const bool vectors = aligned(grad) && aligned(p) && aligned(m) && aligned(v) && aligned(vmax) && aligned(out);
  const long long thread = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long threads = gridDim.x * static_cast<long long>(blockDim.x);
  const long long whole = vectors ? r.n / kVector : 0;
  auto update = [&](typename Grad::Storage g, float& p1, Stored& m1, Stored& v1, float& vmax1, long long at) {
    Moments<State> moments(m1, Step::has_second ? v1 : Stored{}, vmax1);
    Step::update(read_gradient<Grad>(g, form), p1, moments.m, moments.v, moments.vmax, form);
    moments.leave(m1, v1, vmax1, State::bits(r.first + static_cast<unsigned int>(at), s.rounding_key));
  };
  for (long long i = thread; i < whole; i += threads) {
    const long long at = i * kVector;
    Pack<typename Grad::Storage> gs;
    Pack<Stored> ms, vs;
    Pack<float> ps, vmaxs;
    gs.load(grad + at);
    ps.load(p + at);
    ms.load(m + at);
    if (Step::has_second) vs.load(v + at);
    if (third) vmaxs.load(vmax + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) update(gs.value[k], ps.value[k], ms.value[k], vs.value[k], vmaxs.value[k], at + k);
    ps.store(p + at);
    ms.store(m + at);
    if (Step::has_second) vs.store(v + at);
    if (third) vmaxs.store(vmax + at);
    if (out != nullptr) {
      Pack<typename Out::Storage> weights;
#pragma unroll
      for (int k = 0; k < kVector; ++k) weights.value[k] = Out::narrow(ps.value[k]);
      weights.store(out + at);
    }
  }
  for (long long i = whole * kVector + thread; i < r.n; i += threads) {
    float largest = third ? vmax[i] : 0.0f, weight = p[i];
    Stored second = Step::has_second ? v[i] : Stored{};
    update(grad[i], weight, m[i], second, largest, i);
    p[i] = weight;
    if (Step::has_second) v[i] = second;
    if (third) vmax[i] = largest;
    if (out != nullptr) out[i] = Out::narrow(weight);
  }
}

struct Rows {
  Row at[kRowsPerLaunch];
};
static_assert(sizeof(Row) == 136 && sizeof(Rows) <= 4096, "kernel parameters, as cuda_device.cpp packs them");

__device__ __forceinline__ bool left_out(const Row& row) { return row.skip != nullptr && *row.skip != 0.0f; }

}  // namespace hytrain_fx

#define UPDATE_ROWS(name, update)                                                                                                \
  extern "C" __global__ void __launch_bounds__(hytrain_fx::kBlockThreads) name(const __grid_constant__ hytrain_fx::Rows rows) { \
    using namespace hytrain_fx;                                                                                                  \
    const Row& r = rows.at[blockIdx.y];                                                                                          \
    if (!left_out(r)) update;                                                                                                    \
  }

#define UPDATE_ROWS_WHOLE(name, Step, Grad, Out)                                                                  \
  UPDATE_ROWS(name, (update_whole<AnyForm, Step, Grad, Out, Wide>(r)))                                             \
  UPDATE_ROWS(name##_moments16, (UsualForm::is_of(r.scalars) ? update_whole<UsualForm, Step, Grad, Out, Narrow>(r) \
                                                             : update_whole<AnyForm, Step, Grad, Out, Narrow>(r)))

UPDATE_ROWS_WHOLE(adamw_rows_f32, AdamW, F32, F32)
UPDATE_ROWS_WHOLE(adamw_rows_bf16, AdamW, BF16, BF16)
UPDATE_ROWS_WHOLE(adamw_rows_f16, AdamW, F16, F16)
UPDATE_ROWS_WHOLE(adamw_rows_f32_bf16, AdamW, F32, BF16)

UPDATE_ROWS_WHOLE(lion_rows_f32, Lion, F32, F32)
UPDATE_ROWS_WHOLE(lion_rows_bf16, Lion, BF16, BF16)
UPDATE_ROWS_WHOLE(lion_rows_f16, Lion, F16, F16)

#define UPDATE_ROWS_SPLIT(name, Step, Grad)                                                                    \
  UPDATE_ROWS(name, (update_split<AnyForm, Step, Grad, Wide>(r)))                                               \
  UPDATE_ROWS(name##_moments16, (UsualForm::is_of(r.scalars) ? update_split<UsualForm, Step, Grad, Narrow>(r) \
                                                             : update_split<AnyForm, Step, Grad, Narrow>(r)))

UPDATE_ROWS_SPLIT(adamw_rows_split, AdamW, BF16)
UPDATE_ROWS_SPLIT(adamw_rows_split_f32, AdamW, F32)
