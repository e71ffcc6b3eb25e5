// The engine's table of rows, its start and end, what it measures and what tests provoke. The rest of it:
//   engine_nodes.cpp    what the nodes of the graphs and eager reads call
//   engine_commit.cpp   what step() calls
//   engine_threads.cpp  lander, workers
//   engine_guess.cpp    updates before the factors of their gradients are known
//   engine_early.cpp    updates before step()
//   engine_upload.cpp   uploader
#include "engine.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

namespace hytrain_fx {

Engine::Engine(const EngineOptions& options)
    : options_(options),
      device_(options.device_ordinal < 0 ? make_cpu_device()
                                         : make_cuda_device(options.device_ordinal, options.adamw_functions, options.gather_function)),
      worker_cores_(options.worker_cores, options.worker_cores ? options.worker_cores + options.workers : nullptr),
      ring_(options.ring, options.ring_bytes),
      running_(options.workers, -1) {
  options_.timeout_s = std::min(options.timeout_s, kLongestWaitS);
  try {
    start_threads();
  } catch (const std::system_error& error) {
    stop_threads();  // those that run; the destructor of an engine that was not made is not called
    throw std::runtime_error("the system gave " + std::to_string(threads_.size()) + " threads, expected " + std::to_string(options.workers + 2) +
                             " (workers=" + std::to_string(options.workers) + ", and one for each direction of copies): " + error.what() +
                             "; allow this process more threads or address space, or ask for fewer workers");
  }
}

Engine::~Engine() { stop_threads(); }

void Engine::start_threads() {
  const auto start = [this](auto run, const std::string& name) {
    threads_.emplace_back(run);
    name_thread(threads_.back(), name);
  };
  start([this] { guarded("copy to the host", &Engine::land); }, "hytrain-lander");
  start([this] { guarded("copy to the device", &Engine::upload); }, "hytrain-upload");
  for (int i = 0; i < options_.workers; ++i) {
    start([this, i] {
      try {
        work(i);
      } catch (const std::exception& error) {
        fail(std::string("CPU update: ") + error.what());
      }
    }, "hytrain-cpu-" + std::to_string(i));
  }
}

void Engine::stop_threads() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    raise_all_flags();
    landed_cv_.notify_all();
    work_cv_.notify_all();
    upload_cv_.notify_all();
    issued_cv_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

// ---- the table of rows ----

void Engine::set_unit(int row, int unit) {
  {
    std::lock_guard lock(mutex_);
    if (at(row).spec.unit == unit) return;
  }
  drain(&row, 1);  // what is under way goes by its unit
  std::lock_guard lock(mutex_);
  at(row).spec.unit = unit;
}

void Engine::set_weight(int row, void* weight) {
  EngineLock lock(mutex_);
  end_flagged(lock);
  Row& r = at(row);
  if (r.phase != Phase::IDLE && r.phase != Phase::GRAD) {
    throw std::logic_error("row " + std::to_string(row) + " is given other memory while its update is in flight");
  }
  r.spec.weight = weight;
}

void Engine::use_copy(int row, void* copy) {
  EngineLock lock(mutex_);
  end_flagged(lock);
  Row& r = at(row);
  if (r.phase != Phase::IDLE || r.copied || weight_dtype(r) != Dtype::kF32) {
    throw std::logic_error("row " + std::to_string(row) + " is given a copy, but is in use, has one, or is not fp32");
  }
  r.copied = true;
  r.spec.dtype = static_cast<int32_t>(Dtype::kBF16);
  r.grad_dtype = Dtype::kBF16;
  r.spec.weight = copy;
}

void Engine::set_gradient_dtype(int row, Dtype dtype) {
  EngineLock lock(mutex_);
  const int32_t rows[] = {row};
  withdraw(rows, 1, lock);  // an update ahead of its commit reads the gradient that was there
  end_flagged(lock);
  throw_if_failed();
  Row& r = at(row);
  if (!r.copied) throw std::logic_error("row " + std::to_string(row) + " has no copy: its gradients are of its weight's dtype");
  if (r.phase == Phase::PENDING) throw std::runtime_error("row " + std::to_string(row) + " has a new gradient while its last update is in flight");
  r.grad_dtype = dtype;
}

void Engine::add_row(const RowSpec& spec) {
  std::lock_guard lock(mutex_);
  Row row;
  row.spec = spec;
  row.grad_dtype = static_cast<Dtype>(spec.dtype);
  for (int64_t begin = 0; begin < spec.numel; begin += kChunk) {
    Chunk chunk{begin, std::min(begin + kChunk, spec.numel), 0};
    chunk.granules = static_cast<int>((chunk.end - chunk.begin + kGranule - 1) / kGranule);
    chunk.shadows.resize(chunk.granules);
    row.chunks.push_back(chunk);
  }
  uint32_t* const flags = device_->flags(row.chunks.size());
  for (size_t c = 0; c < row.chunks.size(); ++c) row.chunks[c].flag = flags ? flags + c : nullptr;
  rows_.push_back(std::move(row));
}

Engine::Row& Engine::at(int row) {
  if (row < 0 || row >= static_cast<int>(rows_.size())) throw std::out_of_range("row " + std::to_string(row) + " is not in the table");
  return rows_[row];
}

// A gradient that was discarded may still be on its way to the slot, whose memory the caller is about to free, or back from it.
void Engine::finish_landing(int row) {
  EventPtr landing, fetch;
  {
    EngineLock lock(mutex_);
    end_flagged(lock);
    landing = at(row).landing;
    fetch = last_fetch_;
  }
  if (landing) landing->sync();
  if (fetch) fetch->sync();
}

// The copy of a gradient that was dropped has ended, but the lander may note it yet: not for the row in its new place.
Engine::Row& Engine::place(int row, Place place) {
  Row& r = at(row);
  if (r.phase != Phase::IDLE || !is_home(r)) throw std::logic_error("row " + std::to_string(row) + " is moved while in use");
  ++r.generation;
  r.place = place;
  r.skipped = false;
  r.landing = nullptr;  // the slot has no gradient
  return r;
}

void Engine::place_on_host(int row, const HostStates& states) {
  finish_landing(row);
  std::lock_guard lock(mutex_);
  place(row, Place::HOST).host = states;
}

void Engine::place_on_device(int row, const DeviceStates& states) {
  finish_landing(row);
  std::lock_guard lock(mutex_);
  place(row, Place::DEVICE).device = states;
}

void Engine::place_streamed(int row, const HostStates& states) {
  finish_landing(row);
  std::lock_guard lock(mutex_);
  if (staging_.empty()) throw std::logic_error("row " + std::to_string(row) + " is to be streamed, but there is no staging memory");
  place(row, Place::STREAMED).host = states;
}

void Engine::send_weight(int row, bool on) {
  std::lock_guard lock(mutex_);
  at(row).sends_weight = on;
}

// ---- failure, measurement, tests ----

void Engine::guarded(const char* who, void (Engine::*loop)()) {
  try {
    (this->*loop)();
  } catch (const std::exception& error) {
    fail(std::string(who) + ": " + error.what());
  }
}

void Engine::fail(const std::string& message) {
  std::lock_guard lock(mutex_);
  note_failure(message);
}

void Engine::note_failure(const std::string& message) {
  if (failure_.empty()) failure_ = message;
  raise_all_flags();
  issued_cv_.notify_all();
}

void Engine::throw_if_failed() {
  if (failure_.empty()) {
    const int32_t bad = __atomic_load_n(options_.nonfinite, __ATOMIC_RELAXED);  // written by the device
    if (bad) note_failure(nonfinite_message(bad - 1));
  }
  if (!failure_.empty()) throw std::runtime_error("the engine has failed: " + failure_);
}

void Engine::set_delay(int stage, double mean_us) {
  switch (stage) {
    case 0: device_->set_delay(Lane::D2H, mean_us); break;
    case 1: worker_delay_us_ = mean_us; break;
    case 2:
      device_->set_delay(Lane::UPDATE, mean_us);
      device_->set_delay(Lane::STREAM_UPDATE, mean_us);
      break;
    case 3:  // new weights and streamed states share the lane
    case 6: device_->set_delay(Lane::H2D, mean_us); break;
    case 4: lander_delay_us_ = mean_us; break;
    case 5: reload_delay_us_ = mean_us; break;
    case 7: device_->set_delay(Lane::STREAM_OUT, mean_us); break;
    default: throw std::out_of_range("delay stage " + std::to_string(stage) + ": expected 0..7");
  }
}

void Engine::note(int kind, int row, int chunk, int worker, double begin_us, double end_us) {
  if (recording_) records_.push_back({kind, row, chunk, worker, begin_us, end_us});
}

// A worker takes one granule after the other; of one row they make one record.
void Engine::note_update(int row, int chunk, int worker, double begin_us, double end_us) {
  constexpr double kPauseUs = 20;
  if (!recording_) return;
  int& last = running_[worker];
  if (last >= 0 && records_[last].row == row && begin_us - records_[last].end_us < kPauseUs) {
    records_[last].end_us = end_us;
    return;
  }
  last = static_cast<int>(records_.size());
  note(1, row, chunk, worker, begin_us, end_us);
}

FinishTimes Engine::finish_times() {
  std::lock_guard lock(mutex_);
  return last_finish_;
}

void Engine::record(bool on) {
  std::lock_guard lock(mutex_);
  recording_ = on;
}

// What the lanes have done. The driver is asked several times for each, which takes long while copies are launched: no lock is held then.
std::vector<TaskRecord> Engine::take_done_lanes() {
  std::vector<LaneRecord> lanes;
  {
    std::lock_guard lock(mutex_);
    lanes.swap(lane_records_);
  }
  const auto undone = std::stable_partition(lanes.begin(), lanes.end(), [](const LaneRecord& lane) { return lane.end->done(); });
  if (undone != lanes.begin()) device_->take_epoch();
  std::vector<TaskRecord> done;
  for (auto lane = lanes.begin(); lane != undone; ++lane) {
    done.push_back({lane->kind, lane->row, lane->chunk, 0, lane->begin->time_us(), lane->end->time_us()});
  }
  std::lock_guard lock(mutex_);
  lane_records_.insert(lane_records_.end(), std::make_move_iterator(undone), std::make_move_iterator(lanes.end()));
  return done;
}

int Engine::take_records(TaskRecord* out, int capacity) {
  const std::vector<TaskRecord> lanes = take_done_lanes();
  std::lock_guard lock(mutex_);
  records_.insert(records_.end(), lanes.begin(), lanes.end());
  const int n = std::min<int>(capacity, static_cast<int>(records_.size()));
  std::copy(records_.begin(), records_.begin() + n, out);
  records_.erase(records_.begin(), records_.begin() + n);
  std::fill(running_.begin(), running_.end(), -1);
  return n;
}

double Engine::cpu_update_us(int row) {
  std::lock_guard lock(mutex_);
  return at(row).last_busy_us;
}

}  // namespace hytrain_fx
