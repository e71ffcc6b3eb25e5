#include "engine.h"

#include <stdexcept>
#include <system_error>

namespace hytrain_fx {

Engine::Engine(const EngineOptions& options) : state_(options) {
  try {
    start("hytrain-lander", "copy to the host", [this] { lander_.run(); });
    start("hytrain-upload", "copy to the device", [this] { uploader_.run(); });
    for (int i = 0; i < options.workers; ++i) {
      start("hytrain-cpu-" + std::to_string(i), "CPU update", [this, i] { workers_.run(i); });
    }
  } catch (const std::system_error& error) {
    stop_threads();  // the running ones: an engine that was not made has no destructor
    throw std::runtime_error("the system gave " + std::to_string(threads_.size()) + " threads, expected " +
                             std::to_string(options.workers + 2) + " (workers=" + std::to_string(options.workers) +
                             ", and one for each direction of copies): " + error.what() +
                             "; allow this process more threads or address space, or ask for fewer workers");
  } catch (...) {
    stop_threads();
    throw;
  }
}

Engine::~Engine() { stop_threads(); }

template <class Run>
void Engine::start(const std::string& name, const char* what, Run run) {
  threads_.emplace_back([this, what, run] {
    try {
      run();
    } catch (const std::exception& error) {
      fail(std::string(what) + ": " + error.what());
    }
  });
  name_thread(threads_.back(), name);
}

void Engine::stop_threads() {
  {
    std::lock_guard lock(state_.mutex);
    state_.stop = true;
    state_.raise_all_flags();
    state_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

// ---- the table of rows ----

void Engine::add_row(const RowSpec& spec) {
  std::lock_guard lock(state_.mutex);
  const auto chunks = static_cast<size_t>((spec.numel + kChunk - 1) / kChunk);
  state_.rows.emplace_back(spec, static_cast<int>(state_.rows.size()), state_.device->flags(chunks));
}

void Engine::set_unit(int row, int unit) {
  {
    std::lock_guard lock(state_.mutex);
    if (state_.row(row).spec.unit == unit) return;
  }
  drain(&row, 1);  // what is under way goes by its unit
  std::lock_guard lock(state_.mutex);
  state_.row(row).spec.unit = unit;
}

void Engine::set_weight(int row, void* weight) {
  EngineLock lock(state_.mutex);
  tail_.await_end(lock);
  Row& r = state_.row(row);
  if (r.phase != Phase::IDLE && r.phase != Phase::GRAD) {
    throw std::logic_error(r.name() + " is given other memory while its update is in flight");
  }
  r.spec.weight = weight;
}

void Engine::use_copy(int row, void* copy) {
  EngineLock lock(state_.mutex);
  tail_.await_end(lock);
  Row& r = state_.row(row);
  if (r.phase != Phase::IDLE || r.weight_dtype() != Dtype::kF32) {
    throw std::logic_error(r.name() + " is given a copy, but is in use, has one, or is not fp32");
  }
  r.spec.dtype = static_cast<int32_t>(Dtype::kBF16);
  r.grad_dtype = Dtype::kBF16;
  r.spec.weight = copy;
}

void Engine::set_gradient_dtype(int row, Dtype dtype) {
  EngineLock lock(state_.mutex);
  const int32_t rows[] = {row};
  // an update ahead of its commit reads the gradient that was there
  early_.withdraw(rows, 1, lock);
  tail_.await_end(lock);
  state_.throw_if_failed();
  Row& r = state_.row(row);
  if (!r.has_copy()) throw std::logic_error(r.name() + " has no copy: its gradients are of its weight's dtype");
  if (r.phase == Phase::PENDING) throw std::runtime_error(r.name() + " has a new gradient while its last update is in flight");
  r.grad_dtype = dtype;
}

// A gradient, also one that was discarded, may still be on its way to the slot, whose memory the
// caller is about to write or to free, or back from it.
void Engine::finish_landing(int row) {
  EventPtr landing, fetch;
  {
    EngineLock lock(state_.mutex);
    tail_.await_end(lock);
    landing = state_.row(row).landing;
    fetch = fetches_.last();
  }
  if (landing) landing->sync();
  if (fetch) fetch->sync();
}

// The copy of a gradient that was dropped has ended, but the lander may not have noted it yet. It
// must not note it for the row in its new place.
Row& Engine::place(int row, Place place) {
  Row& r = state_.row(row);
  if (r.phase != Phase::IDLE || !r.is_home()) throw std::logic_error(r.name() + " is moved while in use");
  ++r.generation;
  r.place = place;
  r.factors_are = Factors::KNOWN;
  r.landing = nullptr;  // the slot has no gradient
  return r;
}

void Engine::place_on_host(int row, const HostStates& states) {
  finish_landing(row);
  std::lock_guard lock(state_.mutex);
  place(row, Place::HOST).host = states;
}

void Engine::place_on_device(int row, const DeviceStates& states) {
  finish_landing(row);
  std::lock_guard lock(state_.mutex);
  place(row, Place::DEVICE).device = states;
}

void Engine::place_streamed(int row, const HostStates& states) {
  finish_landing(row);
  std::lock_guard lock(state_.mutex);
  if (staging_.is_empty()) throw std::logic_error("row " + std::to_string(row) + " is to be streamed, but there is no staging memory");
  place(row, Place::STREAMED).host = states;
}

void Engine::send_weight(int row, bool on) {
  std::lock_guard lock(state_.mutex);
  state_.row(row).streamed.sends_weight = on;
}

void Engine::set_shadow(const ShadowMemory& memory) {
  std::lock_guard lock(state_.mutex);
  state_.shadows.set(memory);
}

// ---- called by the nodes of the backward graph, and by step() ----

void Engine::grad_offload(const int32_t* rows, const void* const* grads, int n, void* stream) {
  std::vector<Part> parts;
  {
    EngineLock lock(state_.mutex);
    early_.withdraw(rows, n, lock);
    state_.throw_if_failed();
    parts = offload_.begin(rows, grads, n);
  }
  offload_.copy(parts, stream);
}

void Engine::arm_cpu(const int32_t* rows, int n) {
  std::lock_guard lock(state_.mutex);
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    if (!row.on_host()) continue;
    row.arm(Arm::CPU);
    state_.queue_ready(row);
  }
}

void Engine::arm_gpu(const int32_t* rows, int n, void* stream) {
  EventPtr event = state_.device->record_compute(stream);
  std::lock_guard lock(state_.mutex);
  ++state_.marks;
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    if (row.on_host()) continue;
    row.ready = event;
    row.open_at(event, state_.marks);
  }
}

void Engine::arm_reload(const int32_t* rows, int n) {
  std::lock_guard lock(state_.mutex);
  for (int i = 0; i < n; ++i) state_.row(rows[i]).arm(Arm::RELOAD);
  if (!state_.updated.empty()) state_.upload_cv.notify_one();
}

void Engine::release(const int32_t* rows, int n, void* stream) {
  EventPtr event = state_.device->record_compute(stream);
  std::lock_guard lock(state_.mutex);
  state_.clock.released(state_.device->now_us());
  ++state_.marks;
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    row.released = event;
    row.open_at(event, state_.marks);
  }
  if (!state_.updated.empty()) state_.upload_cv.notify_one();
}

void Engine::commit_early(const int32_t* rows, int n, const UpdateScalars& scalars, int workers) {
  if (workers < 1) throw std::logic_error("internal: no worker for updates ahead of a commit");
  EngineLock lock(state_.mutex);
  homeward_.carry_all(lock);  // another thread's drain() may be reading the states
  state_.throw_if_failed();
  state_.early_workers = workers;
  early_.begin(rows, n, scalars);
}

void Engine::discard(const int32_t* rows, int n) {
  EngineLock lock(state_.mutex);
  early_.withdraw(rows, n, lock);
  for (int i = 0; i < n; ++i) {
    Row& row = state_.row(rows[i]);
    if (row.phase == Phase::NEXT_GRAD) row.phase = Phase::PASSED;
    if (row.phase == Phase::GRAD) row.phase = Phase::IDLE;
  }
}

bool Engine::pending(int row) {
  std::lock_guard lock(state_.mutex);
  return state_.row(row).phase == Phase::PENDING;
}

bool Engine::issued(const int32_t* rows, int n) {
  std::lock_guard lock(state_.mutex);
  for (int i = 0; i < n; ++i) {
    const Row& row = state_.row(rows[i]);
    if (row.phase == Phase::PENDING && !row.is_issued()) return false;
  }
  return true;
}

// ---- measurement, tests ----

void Engine::record(bool on) {
  std::lock_guard lock(state_.mutex);
  state_.records.turn(on);
}

GuessCounts Engine::guess_counts() {
  std::lock_guard lock(state_.mutex);
  return guesses_.counts();
}

EarlyCounts Engine::early_counts() {
  std::lock_guard lock(state_.mutex);
  return tally_.counts();
}

FinishTimes Engine::finish_times() {
  std::lock_guard lock(state_.mutex);
  return state_.clock.last();
}

double Engine::cpu_update_us(int row) {
  std::lock_guard lock(state_.mutex);
  return state_.row(row).last_busy_us;
}

void Engine::set_delay(int stage, double mean_us) {
  switch (stage) {
    case 0: state_.device->set_delay(Lane::D2H, mean_us); break;
    case 1: state_.provoked.worker_delay_us = mean_us; break;
    case 2:
      state_.device->set_delay(Lane::UPDATE, mean_us);
      state_.device->set_delay(Lane::STREAM_UPDATE, mean_us);
      break;
    case 3:  // new weights and streamed states share the lane
    case 6: state_.device->set_delay(Lane::H2D, mean_us); break;
    case 4: state_.provoked.lander_delay_us = mean_us; break;
    case 5: state_.provoked.uploader_delay_us = mean_us; break;
    case 7: state_.device->set_delay(Lane::STREAM_OUT, mean_us); break;
    default: throw std::out_of_range("delay stage " + std::to_string(stage) + ": expected 0..7");
  }
}

}  // namespace hytrain_fx
