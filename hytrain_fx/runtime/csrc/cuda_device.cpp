// Lanes as CUDA streams, through the driver library that torch has already loaded: no CUDA headers,
// no link dependency.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "locks.h"

namespace hytrain_fx {
namespace {

// The driver's C interface, as far as it is used. Names and signatures: CUDA driver API, v2 entry
// points.
using CUresult = int;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUfunction = void*;
using CUdeviceptr = unsigned long long;
constexpr CUresult kSuccess = 0;
constexpr CUresult kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr long long kUpdateBlocks = 2048;  // by row; the kernel strides over the rest
// by part; a few on each multiprocessor saturate its memory
constexpr long long kGatherBlocks = 512;
constexpr long long kGatherBytesPerBlock = 16384;
constexpr unsigned kEventDefault = 0;  // with timing. Not BLOCKING_SYNC: see CudaEvent::sync
constexpr size_t kFlags = 4096;  // allocated at once
// CU_MEMHOSTALLOC_PORTABLE, CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WRITE_VALUE_DEFAULT
constexpr unsigned kPortable = 1, kWaitUntilReached = 0, kWriteAfterAll = 0;
// CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: one address for both
constexpr int kUnifiedAddresses = 41;
constexpr int kRelaxedCapture = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
// each query takes the lock of launches
constexpr auto kPollInterval = std::chrono::microseconds(100);

struct Driver {
  CUresult (*init)(unsigned);
  CUresult (*retain)(CUcontext*, int);
  CUresult (*release)(int);
  CUresult (*set_current)(CUcontext);
  CUresult (*get_current)(CUcontext*);
  CUresult (*push_current)(CUcontext);
  CUresult (*pop_current)(CUcontext*);
  CUresult (*priorities)(int*, int*);
  CUresult (*stream_create)(CUstream*, unsigned, int);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*stream_sync)(CUstream);
  CUresult (*stream_wait)(CUstream, CUevent, unsigned);
  CUresult (*event_create)(CUevent*, unsigned);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_query)(CUevent);
  CUresult (*event_elapsed)(float*, CUevent, CUevent);
  CUresult (*h2d)(CUdeviceptr, const void*, size_t, CUstream);
  CUresult (*d2h)(void*, CUdeviceptr, size_t, CUstream);
  CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**);
  CUresult (*error_string)(CUresult, const char**);
  CUresult (*attribute)(int*, int, int);
  CUresult (*host_alloc)(void**, size_t, unsigned);
  CUresult (*host_free)(void*);
  // null: not in this driver
  CUresult (*wait_value)(CUstream, CUdeviceptr, uint32_t, unsigned) = nullptr;
  CUresult (*write_value)(CUstream, CUdeviceptr, uint32_t, unsigned) = nullptr;
  CUresult (*exchange_capture_mode)(int*) = nullptr;  // of the calling thread

  Driver() {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!lib) throw std::runtime_error("libcuda.so.1 cannot be loaded: is the NVIDIA driver installed?");
    auto load = [lib](auto& target, const char* name) {
      void* symbol = dlsym(lib, name);
      if (!symbol) throw std::runtime_error(std::string("the CUDA driver lacks ") + name);
      target = reinterpret_cast<std::decay_t<decltype(target)>>(symbol);
    };
    load(init, "cuInit");
    load(retain, "cuDevicePrimaryCtxRetain");
    load(release, "cuDevicePrimaryCtxRelease_v2");
    load(set_current, "cuCtxSetCurrent");
    load(get_current, "cuCtxGetCurrent");
    load(push_current, "cuCtxPushCurrent_v2");
    load(pop_current, "cuCtxPopCurrent_v2");
    load(priorities, "cuCtxGetStreamPriorityRange");
    load(stream_create, "cuStreamCreateWithPriority");
    load(stream_destroy, "cuStreamDestroy_v2");
    load(stream_sync, "cuStreamSynchronize");
    load(stream_wait, "cuStreamWaitEvent");
    load(event_create, "cuEventCreate");
    load(event_destroy, "cuEventDestroy_v2");
    load(event_record, "cuEventRecord");
    load(event_query, "cuEventQuery");
    load(event_elapsed, "cuEventElapsedTime");
    load(h2d, "cuMemcpyHtoDAsync_v2");
    load(d2h, "cuMemcpyDtoHAsync_v2");
    load(launch, "cuLaunchKernel");
    load(error_string, "cuGetErrorString");
    load(attribute, "cuDeviceGetAttribute");
    load(host_alloc, "cuMemHostAlloc");
    load(host_free, "cuMemFreeHost");
    wait_value = reinterpret_cast<decltype(wait_value)>(dlsym(lib, "cuStreamWaitValue32_v2"));
    write_value = reinterpret_cast<decltype(write_value)>(dlsym(lib, "cuStreamWriteValue32_v2"));
    exchange_capture_mode = reinterpret_cast<decltype(exchange_capture_mode)>(dlsym(lib, "cuThreadExchangeStreamCaptureMode"));
  }
  void check(CUresult result, const char* what) const {
    if (result == kSuccess) return;
    const char* text = nullptr;
    error_string(result, &text);
    throw DeviceError(std::string(what) + ": CUDA error " + std::to_string(result) + " (" + (text ? text : "unknown") + ")");
  }
};

// A context, on this thread, for as long as this lives. The loop's own thread may have another
// current device, or none yet, and keeps that. Events are made in the current context, and kernels
// are launched in it.
class Current {
 public:
  Current(const Driver& driver, CUcontext context) : driver_(driver) {
    CUcontext before = nullptr;
    driver_.check(driver_.get_current(&before), "ask for the context");
    if (before == context) return;
    driver_.check(driver_.push_current(context), "set the context");
    pushed_ = true;
  }
  ~Current() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Events are pooled: about a thousand are recorded in a step.
class EventPool {
 public:
  explicit EventPool(const Driver& driver) : driver_(driver) {}
  ~EventPool() {
    for (CUevent event : free_) driver_.event_destroy(event);
  }
  CUevent take() {  // the device's context is current
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        CUevent event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    CUevent event;
    driver_.check(driver_.event_create(&event, kEventDefault), "create an event");
    return event;
  }
  void give(CUevent event) {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  const Driver& driver_;
  OrderedMutex<LockOrder::kEventPool> mutex_;
  std::vector<CUevent> free_;
};

// What events share; outlives the device while an event is held.
struct CudaShared {
  Driver driver;
  CUcontext context = nullptr;
  EventPool pool{driver};
  ~CudaShared() {
    if (epoch) pool.give(epoch);
  }
  CUevent epoch = nullptr;
  double epoch_us = 0;
};

// Numbers that a lane writes to pinned memory, one after the other, behind its events. So whoever
// waits for one need not ask the driver, which makes it wait for a thread that is blocked in it.
struct LaneSigns {
  OrderedMutex<LockOrder::kQueue> mutex;  // the numbers come on the lane in their order
  uint32_t* word = nullptr;               // null: this driver cannot write it, or nobody asks for it
  uint32_t shown = 0;
};

class CudaEvent : public Event {
 public:
  explicit CudaEvent(std::shared_ptr<CudaShared> shared) : shared_(std::move(shared)), event_(shared_->pool.take()) {}
  // From here on it has come when `word` says `number` or more.
  void show_by(const uint32_t* word, uint32_t number) {
    word_ = word;
    number_ = number;
  }
  ~CudaEvent() override { shared_->pool.give(event_); }
  double time_us() override {
    const Current current(shared_->driver, shared_->context);
    float elapsed_ms = 0;
    shared_->driver.check(shared_->driver.event_elapsed(&elapsed_ms, event_, shared_->epoch), "time an event");
    return shared_->epoch_us - 1e3 * elapsed_ms;
  }
  CUevent handle() const { return event_; }

 private:
  bool shows() override { return word_ ? is_raised(word_, number_) : query(); }
  bool query() override {
    if (word_ && is_raised(word_, number_)) return true;
    if (word_ && ++asked_ % kAskedForErrors != 0) return false;
    const Current current(shared_->driver, shared_->context);
    CUresult result = shared_->driver.event_query(event_);
    if (result == kNotReady) return false;
    shared_->driver.check(result, "query an event");
    return true;
  }
  // Polls, with sleeps: the cores belong to the workers, and cuEventSynchronize spins on one.
  // Events made with BLOCKING_SYNC would let it sleep. But once such an event comes after a copy,
  // cuMemcpyDtoHAsync on that stream returns only when earlier copies have run. Then the thread
  // that launches the backward is held back to the GPU's pace (seen with driver 580 on an H200: 145
  // ms of a 200 ms backward).
  void await() override {
    while (!done()) std::this_thread::sleep_for(kPollInterval);
  }

  static constexpr unsigned kAskedForErrors = 32;  // the driver tells them, the word does not
  std::shared_ptr<CudaShared> shared_;
  CUevent event_;
  const uint32_t* word_ = nullptr;
  uint32_t number_ = 0;
  std::atomic<unsigned> asked_{0};
};

double clock_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

CUevent handle(const EventPtr& event, const char* what) { return static_cast<CudaEvent&>(recorded(event, what)).handle(); }
CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

class CudaDevice : public Device {
 public:
  CudaDevice(int ordinal, void* const* update_functions, void* gather_function)
      : ordinal_(ordinal), shared_(std::make_shared<CudaShared>()), gather_(gather_function) {
    std::copy(update_functions, update_functions + updates_.size(), updates_.begin());
    const Driver& d = shared_->driver;
    d.check(d.init(0), "initialise the driver");
    d.check(d.retain(&shared_->context, ordinal), "retain the primary context");
    const Current current = make_current();
    for (CUstream& stream : streams_) d.check(d.stream_create(&stream, kStreamNonBlocking, 0), "create a stream");
    int least = 0, greatest = 0;
    d.check(d.priorities(&least, &greatest), "ask for priorities");
    d.check(d.stream_create(&clock_stream_, kStreamNonBlocking, greatest), "create a stream");
    shared_->epoch = shared_->pool.take();
    if (!d.write_value || !has_unified_addresses()) return;
    uint32_t* words = pinned_words(kLanes * kWordsApart);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (can_be_shown(static_cast<Lane>(lane))) signs_[lane].word = words + lane * kWordsApart;
    }
  }
  ~CudaDevice() override {
    const Driver& d = shared_->driver;
    d.push_current(shared_->context);
    d.stream_destroy(clock_stream_);
    for (CUstream stream : streams_) {
      d.stream_sync(stream);
      d.stream_destroy(stream);
    }
    for (void* words : words_) d.host_free(words);
    CUcontext popped = nullptr;
    d.pop_current(&popped);
    d.release(ordinal_);
  }
  void bind_thread() override {
    const Driver& d = shared_->driver;
    d.check(d.set_current(shared_->context), "set the context");
    // A thread of the program may capture a CUDA graph of something else meanwhile (a teacher, a
    // sampler). Unless this thread says that it takes no part, its queries break the capture, and
    // are refused.
    int mode = kRelaxedCapture;
    if (d.exchange_capture_mode) d.check(d.exchange_capture_mode(&mode), "stay out of captures");
  }
  EventPtr record_compute(void* stream) override { return record_on(stream); }
  void compute_wait(void* stream, const EventPtr& event) override { wait_on(stream, event); }
  void gather(void* stream, const std::vector<DeviceCopy>& copies) override;
  EventPtr record(Lane lane) override;
  void show(Lane lane) override;
  bool shows_events() override { return signs(Lane::D2H).word != nullptr; }
  void wait(Lane lane, const EventPtr& event) override { wait_on(queue_of(lane), event); }
  void copy(Lane lane, void* dst, const void* src, size_t bytes) override {
    const Driver& d = shared_->driver;
    const Current current = make_current();
    if (goes_to_host(lane)) {
      d.check(d.d2h(dst, address(src), bytes, queue_of(lane)), "copy to the host");
    } else {
      d.check(d.h2d(address(dst), src, bytes, queue_of(lane)), "copy to the device");
    }
  }
  uint32_t* flags(size_t n) override {
    if (n > flags_left_ && !more_flags(std::max(n, kFlags))) return nullptr;
    flags_left_ -= n;
    return std::exchange(next_flag_, next_flag_ + n);
  }
  void wait_flag(Lane lane, const uint32_t* flag, uint32_t value) override {
    const Driver& d = shared_->driver;
    const Current current = make_current();
    d.check(d.wait_value(queue_of(lane), address(flag), value, kWaitUntilReached), "make a stream wait for a flag");
  }
  void update(Lane lane, const std::vector<DeviceUpdate>& rows) override;
  void fail_after(int) override { throw std::logic_error("only the CPU as the device can be made to fail"); }
  void set_delay(Lane, double) override {}  // the test delays a stream with a spinning kernel
  void take_epoch() override {
    const Driver& d = shared_->driver;
    const Current current = make_current();
    d.check(d.event_record(shared_->epoch, clock_stream_), "record the epoch");
    d.check(d.stream_sync(clock_stream_), "record the epoch");
    shared_->epoch_us = clock_us();
  }
  double now_us() override { return clock_us(); }

 private:
  LaneSigns& signs(Lane lane) { return signs_[static_cast<int>(lane)]; }
  CUstream queue_of(Lane lane) {  // for one operation
    place(lane);
    return streams_[static_cast<int>(lane)];
  }
  Current make_current() const { return Current(shared_->driver, shared_->context); }
  EventPtr record_on(CUstream on) {
    const Current current = make_current();
    auto event = std::make_shared<CudaEvent>(shared_);
    shared_->driver.check(shared_->driver.event_record(event->handle(), on), "record an event");
    return event;
  }
  bool more_flags(size_t n) {
    if (!shared_->driver.wait_value || !has_unified_addresses()) return false;
    const Current current = make_current();
    next_flag_ = pinned_words(n);
    flags_left_ = n;
    return true;
  }
  bool has_unified_addresses() {
    int unified = 0;
    shared_->driver.check(shared_->driver.attribute(&unified, kUnifiedAddresses, ordinal_), "ask for an attribute of the device");
    return unified != 0;
  }
  uint32_t* pinned_words(size_t n) {  // zero; the context is current
    void* words = nullptr;
    shared_->driver.check(shared_->driver.host_alloc(&words, n * sizeof(uint32_t), kPortable), "allocate flags");
    words_.push_back(words);
    std::fill_n(static_cast<uint32_t*>(words), n, 0);
    return static_cast<uint32_t*>(words);
  }
  void wait_on(CUstream on, const EventPtr& event) {
    const Current current = make_current();
    shared_->driver.check(shared_->driver.stream_wait(on, handle(event, "stream"), 0), "make a stream wait");
  }
  int ordinal_;
  std::shared_ptr<CudaShared> shared_;
  std::array<CUstream, kLanes> streams_{};
  static constexpr size_t kWordsApart = 16;  // a cache line each
  std::array<LaneSigns, kLanes> signs_;
  std::vector<void*> words_;                // flags and signs
  uint32_t* next_flag_ = nullptr;
  size_t flags_left_ = 0;
  // No work is on it, so its events are reached at once. It has its own priority: streams of one
  // priority share a few queues to the device, and a full queue of the compute stream would hold it
  // up.
  CUstream clock_stream_ = nullptr;
  std::array<CUfunction, kUpdateKernels> updates_{};  // as update_kernel numbers them
  CUfunction gather_;
};

EventPtr CudaDevice::record(Lane lane) {
  const Driver& d = shared_->driver;
  LaneSigns& signs = this->signs(lane);
  if (!signs.word) return record_on(queue_of(lane));
  const Current current = make_current();
  auto event = std::make_shared<CudaEvent>(shared_);
  std::lock_guard lock(signs.mutex);
  d.check(d.event_record(event->handle(), queue_of(lane)), "record an event");
  event->show_by(signs.word, signs.shown + 1);
  return event;
}

void CudaDevice::show(Lane lane) {
  const Driver& d = shared_->driver;
  LaneSigns& signs = this->signs(lane);
  if (!signs.word) return;
  const Current current = make_current();
  std::lock_guard lock(signs.mutex);
  d.check(d.write_value(queue_of(lane), address(signs.word), ++signs.shown, kWriteAfterAll), "write a word behind an event");
}

// Parameters and launch shape as update_rows.cu lists them. The layout of DeviceUpdate differs from
// the kernel's Row.
void CudaDevice::update(Lane lane, const std::vector<DeviceUpdate>& rows) {
  struct Row {
    const void* grad;
    void* master;
    std::array<void*, kMaxStates> states;
    void* out;
    long long n;
    UpdateScalars scalars;  // the key for rounding is the parameter's too
    uint32_t first;
    const float* skip;
  };
  const Current current = make_current();
  for (size_t first = 0; first < rows.size(); first += kRowsPerLaunch) {
    Row packed[kRowsPerLaunch]{};
    const size_t n = std::min<size_t>(kRowsPerLaunch, rows.size() - first);
    long long largest = 0;
    for (size_t i = 0; i < n; ++i) {
      const DeviceUpdate& u = rows[first + i];
      packed[i] = {u.grad, u.low ? static_cast<void*>(u.low) : u.master, {}, u.out, u.numel, u.scalars, u.states.first, u.skip};
      std::copy(u.states.at, u.states.at + kMaxStates, packed[i].states.begin());
      packed[i].scalars.rounding_key ^= u.states.key;
      largest = std::max<long long>(largest, u.numel);
    }
    void* parameters[] = {packed};
    const long long blocks = std::min(kUpdateBlocks, (largest + kBlockElements - 1) / kBlockElements);
    const Driver& d = shared_->driver;
    d.check(d.launch(updates_[update_kernel(rows[first])], static_cast<unsigned>(blocks), static_cast<unsigned>(n), 1, kBlockThreads, 1, 1,
                     0, queue_of(lane), parameters, nullptr),
            "launch an update kernel");
  }
}

// Parameters and launch shape as gather.cu lists them.
void CudaDevice::gather(void* stream, const std::vector<DeviceCopy>& copies) {
  const Current current = make_current();
  for (size_t first = 0; first < copies.size(); first += kPartsPerGather) {
    struct Parts {
      void* dst[kPartsPerGather];
      const void* src[kPartsPerGather];
      long long bytes[kPartsPerGather];
    } parts{};
    const size_t n = std::min<size_t>(kPartsPerGather, copies.size() - first);
    long long largest = 0;
    for (size_t i = 0; i < n; ++i) {
      const DeviceCopy& copy = copies[first + i];
      parts.dst[i] = copy.dst;
      parts.src[i] = copy.src;
      parts.bytes[i] = copy.bytes;
      largest = std::max<long long>(largest, copy.bytes);
    }
    void* parameters[] = {&parts};
    const long long blocks = std::min(kGatherBlocks, (largest + kGatherBytesPerBlock - 1) / kGatherBytesPerBlock);
    const Driver& d = shared_->driver;
    d.check(d.launch(gather_, static_cast<unsigned>(blocks), static_cast<unsigned>(n), 1, kBlockThreads, 1, 1, 0, stream, parameters, nullptr),
            "launch the gather kernel");
  }
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(int ordinal, void* const* update_functions, void* gather_function) {
  return std::make_unique<CudaDevice>(ordinal, update_functions, gather_function);
}

}  // namespace hytrain_fx
