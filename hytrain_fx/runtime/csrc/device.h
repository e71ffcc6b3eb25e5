// The device as the engine sees it: lanes (in-order queues of copies and updates), events, and the
// caller's compute stream.
//
// There are two implementations: CpuDevice (threads, injectable delays) and CudaDevice (streams,
// through the driver). The engine's logic is the same for both, so a CPU test can provoke a race
// that a GPU would show.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "split_chunk.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hytrain_fx {

// The name that `top -H`, profilers and debuggers show; at most 15 characters.
inline void name_thread(std::thread& thread, const std::string& name) { pthread_setname_np(thread.native_handle(), name.c_str()); }

// Rounding to nearest, denormals kept: the kernels are written for it, and a GPU does so. A thread
// begins with the settings of the one that started it, which the loop may have changed
// (torch.set_flush_denormal). So each thread that updates sets its own.
inline void set_arithmetic() {
#if defined(__SSE2__)
  constexpr unsigned kInitialMxcsr = 0x1F80;
  _mm_setcsr(kInitialMxcsr);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
#endif
}

enum class Lane : int { D2H = 0, H2D = 1, UPDATE = 2, FETCH = 3, STREAM_UPDATE = 4, STREAM_OUT = 5 };
constexpr int kLanes = 6;

// Whether somebody looks for its events who must not ask the driver.
inline bool can_be_shown(Lane lane) { return lane == Lane::D2H || lane == Lane::H2D; }

inline bool goes_to_host(Lane lane) { return lane == Lane::D2H || lane == Lane::STREAM_OUT; }

// A point in a lane or in the compute stream. `time_us` is on the host's clock, for an event that
// was done when the device last took its epoch.
class Event {
 public:
  virtual ~Event() = default;
  // Whether it has come. Asks the driver, which may take milliseconds while another thread
  // launches: do not hold the engine's lock.
  bool done() {
    if (!known_done() && query()) known_.store(true, std::memory_order_release);
    return known_done();
  }
  // Waits until it has come. Do not hold the engine's lock, unless it is known to have come.
  void sync() {
    if (known_done()) return;
    await();
    known_.store(true, std::memory_order_release);
  }
  // Like done(), and never held up by a thread that is blocked in the driver, for an event that the
  // device shows (Device::show). Tells nothing of errors.
  bool seen() {
    if (!known_done() && shows()) known_.store(true, std::memory_order_release);
    return known_done();
  }
  // Whether done(), seen() or sync() has said so. An event that has come stays so.
  bool known_done() const { return known_.load(std::memory_order_acquire); }
  virtual double time_us() = 0;

 protected:
  virtual bool query() = 0;
  virtual bool shows() { return query(); }
  virtual void await() = 0;

 private:
  std::atomic<bool> known_{false};
};
using EventPtr = std::shared_ptr<Event>;

// Waiting on an event that was never recorded returns at once on every device and orders nothing;
// here it is an error.
inline Event& recorded(const EventPtr& event, const char* what) {
  if (!event) throw std::logic_error(std::string("internal: wait on an event that was never recorded: ") + what);
  return *event;
}

// What the driver, or a lane, has refused. Nothing that the device does after that is reliable: the
// engine fails as a whole.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whether a flag is `value` or later, as numbers go round.
inline bool is_raised(const uint32_t* flag, uint32_t value) {
  return static_cast<int32_t>(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - value) >= 0;
}

// Operands of one update whose states rest on the device.
struct DeviceUpdate {
  const void* grad;
  Dtype dtype;            // of the gradient
  Dtype out_dtype;        // of the weight: the gradient's, or bf16 where that is fp32
  float* master;          // null where it rests in two halves: `out`, also read, and `low`
  uint16_t* low;
  States states;
  void* out;              // the new weight; null where `master` is the weight
  int64_t numel;
  UpdateScalars scalars;
  // on the device, read when the update runs: nothing is updated if it is not zero; null: always
  // updated
  const float* skip;
};

// One of several copies within the device that are made together.
struct DeviceCopy {
  void* dst;
  const void* src;
  int64_t bytes;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual void bind_thread() = 0;  // makes the device current on a thread of the engine
  virtual EventPtr record_compute(void* stream) = 0;
  virtual void compute_wait(void* stream, const EventPtr& event) = 0;
  virtual void gather(void* stream, const std::vector<DeviceCopy>& copies) = 0;
  virtual EventPtr record(Lane lane) = 0;
  // From here on events that were recorded on the lane before can be seen to come without the
  // driver. Of lanes that can_be_shown, where the device can.
  virtual void show(Lane lane) = 0;
  virtual bool shows_events() = 0;  // whether it can
  EventPtr record_shown(Lane lane) {
    EventPtr event = record(lane);
    show(lane);
    return event;
  }
  virtual void wait(Lane lane, const EventPtr& event) = 0;
  virtual void copy(Lane lane, void* dst, const void* src, size_t bytes) = 0;
  // Words that a lane can wait for: `n` of them, zero, which live as long as the device. Null where
  // the device has no such waits.
  virtual uint32_t* flags(size_t n) = 0;
  virtual void wait_flag(Lane lane, const uint32_t* flag, uint32_t value) = 0;  // until is_raised
  // all of one pair of dtypes, all masters whole or all in halves, all states of one width
  virtual void update(Lane lane, const std::vector<DeviceUpdate>& rows) = 0;
  virtual void set_delay(Lane lane, double mean_us) = 0;  // before each copy; tests only
  // so many more succeed, then none does; tests only
  virtual void fail_after(int operations) = 0;
  // Reads both clocks at one time. They drift apart, and the driver counts in floats, so take times
  // from an epoch close by. It may wait for work of the device: hold no lock that such work may
  // wait for.
  virtual void take_epoch() = 0;
  virtual double now_us() = 0;  // host time on the events' clock
  // What was put on the lane so far: copies, events, waits, written words and updates. Each takes a
  // place in its queue until it has run. Exact for a lane that one thread puts things on, in that thread.
  int64_t placed(Lane lane) const { return placed_[static_cast<int>(lane)]; }

 protected:
  void place(Lane lane) { placed_[static_cast<int>(lane)].fetch_add(1, std::memory_order_relaxed); }

 private:
  std::array<std::atomic<int64_t>, kLanes> placed_{};
};

std::unique_ptr<Device> make_cpu_device();

// The number of the CUDA kernel that an update takes. AdamW's: by Dtype, then masters in halves,
// then bf16 weights with fp32 gradients, whole and in halves. Then Lion's, by Dtype. Then the same
// for states in 16 bits.
inline int update_kernel(const DeviceUpdate& update) {
  const int first = update.states.width == kWideState ? 0 : kUpdateKernels / 2;
  if (static_cast<Kernel>(update.scalars.kernel) == Kernel::kLion) return first + 6 + static_cast<int>(update.dtype);
  const bool mixed = update.dtype != update.out_dtype;
  if (update.low) return first + (mixed ? 5 : 3);
  return first + (mixed ? 4 : static_cast<int>(update.dtype));
}
// CUfunction handles of the compiled kernels: `update_functions` as `update_kernel` numbers them
// (update_rows.cu); `gather_function` (gather.cu).
std::unique_ptr<Device> make_cuda_device(int ordinal, void* const* update_functions, void* gather_function);

}  // namespace hytrain_fx
