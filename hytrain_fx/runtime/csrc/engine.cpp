#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

namespace hytrain_fx {
namespace {

void sleep_us(double mean_us) {
  if (mean_us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(mean_us));
}

const char* offset(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* offset(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }
float* offset_floats(float* base, int64_t n) { return base ? base + n : nullptr; }

// Slots in a slab and gradients in the ring stand this far apart; runtime/slabs.py pads alike.
int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Whether none of n values has all exponent bits set, as infinities and NaN have.
template <class Bits>
bool all_below(const void* values, int64_t n, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(values);
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= static_cast<Bits>((bits[i] & exponent) == exponent);
  return bad == 0;
}

bool all_finite(const void* values, Dtype dtype, int64_t n) {
  switch (dtype) {
    case Dtype::kF32: return all_below<uint32_t>(values, n, 0x7F800000u);
    case Dtype::kBF16: return all_below<uint16_t>(values, n, 0x7F80u);
    default: return all_below<uint16_t>(values, n, 0x7C00u);
  }
}

// Bytes of new weights on their way at once: enough to keep the link busy, few enough to let an urgent layer pass.
constexpr int64_t kReloadBytesInFlight = 24 << 20;

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      device_(options.device_ordinal < 0 ? make_cpu_device()
                                         : make_cuda_device(options.device_ordinal, options.adamw_functions, options.gather_function)),
      ring_(options.ring, options.ring_bytes) {
  threads_.emplace_back([this] { guarded("copy to the host", &Engine::land); });
  threads_.emplace_back([this] { guarded("copy to the device", &Engine::reload); });
  for (int i = 0; i < options_.workers; ++i) {
    threads_.emplace_back([this, i] {
      try {
        work(i);
      } catch (const std::exception& error) {
        fail(std::string("CPU update: ") + error.what());
      }
    });
  }
}

Engine::~Engine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    landed_cv_.notify_all();
    work_cv_.notify_all();
    reload_cv_.notify_all();
    issued_cv_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

// ---- the table of rows ----

void Engine::set_unit(int row, int unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  at(row).spec.unit = unit;
}

int Engine::add_row(const RowSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  Row row;
  row.spec = spec;
  for (int64_t begin = 0; begin < spec.numel; begin += kChunk) {
    Chunk chunk{begin, std::min(begin + kChunk, spec.numel), 0};
    chunk.granules = static_cast<int>((chunk.end - chunk.begin + kGranule - 1) / kGranule);
    row.chunks.push_back(chunk);
  }
  rows_.push_back(std::move(row));
  return static_cast<int>(rows_.size()) - 1;
}

Engine::Row& Engine::at(int row) {
  if (row < 0 || row >= static_cast<int>(rows_.size())) throw std::out_of_range("row " + std::to_string(row) + " is not in the table");
  return rows_[row];
}

void Engine::place_on_host(int row, const HostStates& states) {
  std::lock_guard<std::mutex> lock(mutex_);
  Row& r = at(row);
  if (r.phase != Phase::IDLE) throw std::logic_error("row " + std::to_string(row) + " is moved while in use");
  r.place = Place::HOST;
  r.host = states;
}

void Engine::place_on_device(int row, const DeviceStates& states) {
  std::lock_guard<std::mutex> lock(mutex_);
  Row& r = at(row);
  if (r.phase != Phase::IDLE) throw std::logic_error("row " + std::to_string(row) + " is moved while in use");
  r.place = Place::DEVICE;
  r.device = states;
}

// ---- called by the nodes of the backward graph ----

void Engine::grad_offload(const int32_t* rows, const void* const* grads, int n, void* stream) {
  std::vector<Part> parts;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    for (int i = 0; i < n; ++i) begin_gradient(at(rows[i]), rows[i], grads[i], parts);
  }
  // Not under the lock: on a CPU these calls are the copies. Only the launching thread changes a row in this phase.
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    int64_t bytes = 0;
    while (last < parts.size() && (last == first || bytes + padded(parts[last].bytes) <= static_cast<int64_t>(ring_.largest()))) {
      bytes += padded(parts[last++].bytes);
    }
    copy_piece(parts, first, last, stream);
    first = last;
  }
}

void Engine::begin_gradient(Row& row, int index, const void* grad, std::vector<Part>& parts) {
  if (row.place != Place::HOST) throw std::logic_error("row " + std::to_string(index) + " offloads a gradient but is not placed on the host");
  if (row.phase == Phase::PENDING) {
    throw std::runtime_error("row " + std::to_string(index) + " has a new gradient while its last update is in flight: its wait node did not run");
  }
  row.phase = row.phase == Phase::EXPECTED ? Phase::PENDING : Phase::GRAD;
  ++row.generation;
  row.armed_cpu = row.armed_reload = false;
  row.issued = 0;
  const int64_t size = grad_bytes(row);
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    Chunk& chunk = row.chunks[c];
    chunk.taken = chunk.finished = 0;
    chunk.landed = chunk.queued = false;
    parts.push_back({index, c, row.generation, offset(grad, chunk.begin * size), offset(row.host.slot, chunk.begin * size),
                     (chunk.end - chunk.begin) * size});
  }
}

// One piece of the ring: gathered on the compute stream, from there to the slots in as few copies as their addresses allow.
void Engine::copy_piece(const std::vector<Part>& parts, size_t first, size_t last, void* stream) {
  std::vector<int64_t> at(last - first + 1, 0);
  for (size_t i = first; i < last; ++i) at[i - first + 1] = at[i - first] + padded(parts[i].bytes);
  char* piece = static_cast<char*>(ring_.take(at.back(), *device_, stream));
  std::vector<DeviceCopy> copies;
  for (size_t i = first; i < last; ++i) copies.push_back({piece + at[i - first], parts[i].source, parts[i].bytes});
  device_->gather(stream, copies);
  device_->wait(Lane::D2H, device_->record_compute(stream));
  std::vector<Landing> landings;
  for (size_t begin = first; begin < last;) {
    size_t end = begin + 1;  // slots of a unit stand one after the other, padded as the ring is
    while (end < last && parts[end].slot == parts[end - 1].slot + padded(parts[end - 1].bytes) &&
           at[end + 1 - first] - at[begin - first] <= kCopyBytes) {
      ++end;
    }
    EventPtr before = recording_ ? device_->record(Lane::D2H) : nullptr;
    const int64_t bytes = at[end - 1 - first] - at[begin - first] + parts[end - 1].bytes;
    device_->copy(Lane::D2H, parts[begin].slot, piece + at[begin - first], bytes);
    landings.push_back({before, device_->record(Lane::D2H), {parts.begin() + begin, parts.begin() + end}});
    begin = end;
  }
  ring_.free_after(landings.back().event);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Landing& landing : landings) {
    for (const Part& part : landing.parts) rows_[part.row].landing = landing.event;
  }
  landings_.insert(landings_.end(), landings.begin(), landings.end());
  landed_cv_.notify_one();
}

void Engine::arm_cpu(const int32_t* rows, int n) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    if (row.place != Place::HOST) continue;
    row.armed_cpu = true;
    queue_all_ready(row, rows[i]);
  }
}

void Engine::arm_gpu(const int32_t* rows, int n, void* stream) {
  EventPtr event;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    if (row.place != Place::DEVICE) continue;
    if (!event) event = device_->record_compute(stream);
    row.ready = event;
  }
}

void Engine::arm_reload(const int32_t* rows, int n) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) at(rows[i]).armed_reload = true;
  reload_cv_.notify_one();
}

void Engine::release(const int32_t* rows, int n, void* stream) {
  EventPtr event = device_->record_compute(stream);
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) at(rows[i]).released = event;
  reload_cv_.notify_one();
}

// ---- called by step() ----

void Engine::commit(const CommitItem* items, int n, const void* const* factors, int n_factors, void* stream) {
  if (n_factors > options_.factor_capacity) throw std::logic_error("internal: more factors than slots");
  EventPtr end = device_->record_compute(stream);
  std::unique_lock<std::mutex> lock(mutex_);
  throw_if_failed();
  for (int i = 0; i < n; ++i) check_committable(items[i].row);  // all of them before anything is changed
  bool on_lane = false;
  for (int i = 0; i < n_factors; ++i) {
    if (!factors[i]) continue;
    if (!on_lane) device_->wait(Lane::D2H, end);
    on_lane = true;
    device_->copy(Lane::D2H, factor_slots() + i, factors[i], sizeof(float));
  }
  std::map<std::pair<int, int>, std::vector<const CommitItem*>> on_device;
  for (int i = 0; i < n; ++i) {
    Row& row = at(items[i].row);
    if (items[i].at_end || !row.released) row.released = end;
    if (row.place == Place::DEVICE) {
      on_device[{-row.spec.unit, row.spec.dtype}].push_back(&items[i]);
      continue;
    }
    begin_update(row, items[i]);
    row.factors_known = known_now(items[i], factors);
    queue_all_ready(row, items[i].row);
  }
  for (const auto& [unit_and_dtype, of_unit] : on_device) commit_on_device(of_unit, end);  // the last unit's gradients come first
  ++commits_;
  if (on_lane) {
    landings_.push_back({nullptr, device_->record(Lane::D2H), {}});
    landed_cv_.notify_one();
  }
  reload_cv_.notify_one();
}

void Engine::check_committable(int index) {
  const Row& row = at(index);
  const std::string name = "row " + std::to_string(index);
  if (row.place == Place::DEVICE) {
    if (row.phase == Phase::PENDING) throw std::runtime_error(name + " is committed while its last update is in flight");
    return;
  }
  if (row.phase != Phase::GRAD) throw std::runtime_error(name + " is committed without a gradient");
  if (!row.armed_cpu || !row.armed_reload) {
    throw std::runtime_error("dropped node: " + name + " was offloaded but its " + (row.armed_cpu ? "reload" : "cpu_step") + " node did not run");
  }
}

void Engine::expect(const CommitItem* items, int n) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) {
    Row& row = at(items[i].row);
    if (row.phase != Phase::IDLE || row.place != Place::HOST) throw std::logic_error("only an idle row on the host can be committed ahead");
    begin_update(row, items[i]);
    row.phase = Phase::EXPECTED;
    row.released = nullptr;
  }
}

// Whether every factor of the item is already in its slot, rather than on its way from the device.
bool Engine::known_now(const CommitItem& item, const void* const* factors) {
  for (int i = 0; i < item.n_factors; ++i) {
    if (factors[item.factors[i]]) return false;
  }
  return true;
}

void Engine::begin_update(Row& row, const CommitItem& item) {
  row.phase = Phase::PENDING;
  row.scalars = item.scalars;
  row.n_factors = item.n_factors;
  std::copy(item.factors, item.factors + kMaxFactors, row.factors.begin());
  const float* slots = factor_slots();
  row.factor_base = slots;
  row.factors_known = true;
  row.busy_us = 0;
}

// Rows of one unit and dtype in one launch, behind one event: queues of streams are short, and a full one blocks the launching thread.
void Engine::commit_on_device(const std::vector<const CommitItem*>& items, const EventPtr& end) {
  std::set<EventPtr> awaited;
  std::vector<DeviceUpdate> updates;
  for (const CommitItem* item : items) {
    Row& row = at(item->row);
    awaited.insert(item->at_end || !row.ready ? end : row.ready);
    awaited.insert(row.released);
    updates.push_back({item->grad, static_cast<Dtype>(row.spec.dtype), row.device.master, row.device.exp_avg, row.device.exp_avg_sq,
                       row.device.max_exp_avg_sq, grad_bytes(row) == 2 ? row.spec.weight : nullptr, row.spec.numel, item->scalars});
  }
  for (const EventPtr& event : awaited) device_->wait(Lane::UPDATE, event);
  EventPtr before = recording_ ? device_->record(Lane::UPDATE) : nullptr;
  device_->update(Lane::UPDATE, updates);
  EventPtr after = device_->record(Lane::UPDATE);
  if (before) lane_records_.push_back({2, items[0]->row, 0, before, after});
  for (const CommitItem* item : items) {
    Row& row = at(item->row);
    row.weight = after;
    row.phase = Phase::PENDING;
    row.issued = static_cast<int>(row.chunks.size());
  }
}

float* Engine::factor_slots() { return options_.factor_slots + (commits_ % 2) * options_.factor_capacity; }

// ---- called by the wait nodes, by eager reads, by close ----

void Engine::wait(const int32_t* rows, int n, void* stream) {
  EventPtr reloaded;
  uint64_t issue = 0;
  std::set<EventPtr> updated;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    throw_if_failed();
    for (int i = 0; i < n; ++i) {
      Row& row = at(rows[i]);
      if (row.phase != Phase::PENDING) continue;
      finish_wait(row, rows[i], lock);
      if (row.place == Place::DEVICE) {
        updated.insert(row.weight);
      } else if (!reloaded || row.issue > issue) {
        reloaded = row.weight;
        issue = row.issue;
      }
    }
  }
  if (reloaded) device_->compute_wait(stream, reloaded);
  for (const EventPtr& event : updated) device_->compute_wait(stream, event);
}

void Engine::drain(const int32_t* rows, int n) {
  for (int i = 0; i < n; ++i) {
    std::unique_lock<std::mutex> lock(mutex_);
    throw_if_failed();
    Row& row = at(rows[i]);
    if (row.phase != Phase::PENDING) continue;
    finish_wait(row, rows[i], lock);
    EventPtr weight = row.weight;
    lock.unlock();
    recorded(weight, "drain").sync();
  }
}

void Engine::finish_wait(Row& row, int index, std::unique_lock<std::mutex>& lock) {
  const int chunks = static_cast<int>(row.chunks.size());
  auto issued = [&] { return row.issued == chunks || !failure_.empty(); };
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), issued)) {
    throw std::runtime_error("row " + std::to_string(index) + ": " + std::to_string(row.issued) + " of " + std::to_string(chunks) +
                             " chunks of its new weight were on their way after " + std::to_string(options_.timeout_s) + " s");
  }
  throw_if_failed();
  row.phase = Phase::IDLE;
  row.released = row.ready = nullptr;
}

void Engine::fetch(int row, void* dst, void* stream) {
  EventPtr landing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    if (at(row).phase != Phase::GRAD) throw std::runtime_error("row " + std::to_string(row) + " has no gradient to bring back");
    landing = at(row).landing;
  }
  device_->wait(Lane::FETCH, device_->record_compute(stream));
  device_->wait(Lane::FETCH, landing);
  device_->copy(Lane::FETCH, dst, at(row).host.slot, at(row).spec.numel * grad_bytes(at(row)));
  device_->compute_wait(stream, device_->record(Lane::FETCH));
}

void Engine::discard(const int32_t* rows, int n) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    if (row.phase == Phase::GRAD) row.phase = Phase::IDLE;
  }
}

bool Engine::pending(int row) {
  std::lock_guard<std::mutex> lock(mutex_);
  return at(row).phase == Phase::PENDING;
}

// ---- the three threads ----

void Engine::queue_all_ready(Row& row, int index) {
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) queue_if_ready(row, index, c);
}

void Engine::queue_if_ready(Row& row, int index, int chunk) {
  Chunk& c = row.chunks[chunk];
  if (row.phase != Phase::PENDING || !row.armed_cpu || !row.factors_known || !c.landed || c.queued) return;
  c.queued = true;
  ready_.insert({row.spec.unit, index, chunk});
  work_cv_.notify_all();
}

void Engine::land() {
  device_->bind_thread();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    landed_cv_.wait(lock, [this] { return stop_ || !landings_.empty(); });
    if (stop_) return;
    Landing landing = landings_.front();
    landings_.pop_front();
    lock.unlock();
    landing.event->sync();
    sleep_us(lander_delay_us_);
    lock.lock();
    if (landing.parts.empty()) {
      for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
        if (rows_[r].phase == Phase::PENDING && !rows_[r].factors_known) {
          rows_[r].factors_known = true;
          queue_all_ready(rows_[r], r);
        }
      }
      continue;
    }
    if (landing.begin) lane_records_.push_back({0, landing.parts[0].row, landing.parts[0].chunk, landing.begin, landing.event});
    for (const Part& part : landing.parts) {
      Row& row = rows_[part.row];
      if (row.generation != part.generation) continue;  // dropped by zero_grad() and begun anew
      row.chunks[part.chunk].landed = true;
      queue_if_ready(row, part.row, part.chunk);
    }
  }
}

void Engine::work(int index) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_cv_.wait(lock, [this] { return stop_ || (!ready_.empty() && failure_.empty()); });
    if (stop_) return;
    const Key key = *ready_.begin();
    Row& row = rows_[key[1]];
    Chunk& chunk = row.chunks[key[2]];
    const int granule = chunk.taken++;
    if (chunk.taken == chunk.granules) ready_.erase(ready_.begin());
    AdamScalars scalars = row.scalars;
    for (int i = 0; i < row.n_factors; ++i) scalars.factors[i] = row.factor_base[row.factors[i]];
    scalars.factor_count = static_cast<uint32_t>(row.n_factors);
    lock.unlock();
    sleep_us(worker_delay_us_);
    if (fail_row_ == key[1]) throw std::runtime_error("injected failure in row " + std::to_string(key[1]));
    const double begin_us = device_->now_us();
    run_granule(row, chunk, granule, scalars);
    const double end_us = device_->now_us();
    lock.lock();
    row.busy_us += (end_us - begin_us) / options_.workers;
    note(1, key[1], key[2], index, begin_us, end_us);
    if (++chunk.finished == chunk.granules) {
      updated_.insert(key);
      reload_cv_.notify_one();
    }
  }
}

void Engine::run_granule(Row& row, const Chunk& chunk, int granule, const AdamScalars& scalars) {
  const int64_t begin = chunk.begin + granule * kGranule;
  const int64_t n = std::min(kGranule, chunk.end - begin);
  char* slot = offset(row.host.slot, begin * grad_bytes(row));
  const Dtype dtype = static_cast<Dtype>(row.spec.dtype);
  // Every later weight of such a row would be NaN. The slot is read again at once, from the cache.
  if (!all_finite(slot, dtype, n)) {
    throw std::runtime_error("non-finite gradient: row " + std::to_string(&row - rows_.data()) + " has NaN or infinite values in its gradient");
  }
  adamw_chunk(slot, dtype, row.host.master + begin, row.host.exp_avg + begin, row.host.exp_avg_sq + begin,
              offset_floats(row.host.max_exp_avg_sq, begin), grad_bytes(row) == 2 ? slot : nullptr, dtype, n, scalars);
}

const Engine::Key* Engine::next_reload() {
  EventPtr asked;
  bool answer = false;
  for (const Key& key : updated_) {
    const Row& row = rows_[key[1]];
    if (!row.armed_reload || !row.released) continue;
    if (row.released != asked) {
      asked = row.released;
      answer = asked->done();
    }
    if (answer) return &key;
  }
  return nullptr;
}

void Engine::reload() {
  device_->bind_thread();
  std::deque<std::pair<EventPtr, int64_t>> in_flight;
  int64_t bytes = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    reload_cv_.wait(lock, [this] { return stop_ || !updated_.empty(); });
    if (stop_) return;
    if (bytes >= kReloadBytesInFlight) {
      auto [event, size] = in_flight.front();
      in_flight.pop_front();
      bytes -= size;
      lock.unlock();
      event->sync();
      lock.lock();
      continue;
    }
    const Key* next = next_reload();
    if (!next) {  // what is updated is still being read: ask again soon
      reload_cv_.wait_for(lock, std::chrono::microseconds(50));
      continue;
    }
    const Key key = *next;
    updated_.erase(key);
    issue_reload(key, lock);
    const Row& row = rows_[key[1]];
    const int64_t size = (row.chunks[key[2]].end - row.chunks[key[2]].begin) * grad_bytes(row);
    in_flight.emplace_back(row.weight, size);
    bytes += size;
  }
}

void Engine::issue_reload(const Key& key, std::unique_lock<std::mutex>& lock) {
  Row& row = rows_[key[1]];
  const Chunk& chunk = row.chunks[key[2]];
  const int64_t size = grad_bytes(row);
  const void* source = size == 2 ? row.host.slot : row.host.master;
  const bool recording = recording_;
  lock.unlock();
  sleep_us(reload_delay_us_);
  EventPtr before = recording ? device_->record(Lane::H2D) : nullptr;
  device_->copy(Lane::H2D, offset(row.spec.weight, chunk.begin * size), offset(source, chunk.begin * size), (chunk.end - chunk.begin) * size);
  EventPtr after = device_->record(Lane::H2D);
  lock.lock();
  if (before) lane_records_.push_back({3, key[1], key[2], before, after});
  row.weight = after;
  row.issue = ++issues_;
  if (++row.issued == static_cast<int>(row.chunks.size())) {
    row.last_busy_us = row.busy_us;
    issued_cv_.notify_all();
  }
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
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = message;
  issued_cv_.notify_all();
}

void Engine::throw_if_failed() {
  if (!failure_.empty()) throw std::runtime_error("the engine has failed: " + failure_);
}

void Engine::set_delay(int stage, double mean_us) {
  switch (stage) {
    case 0: device_->set_delay(Lane::D2H, mean_us); break;
    case 1: worker_delay_us_ = mean_us; break;
    case 2: device_->set_delay(Lane::UPDATE, mean_us); break;
    case 3: device_->set_delay(Lane::H2D, mean_us); break;
    case 4: lander_delay_us_ = mean_us; break;
    case 5: reload_delay_us_ = mean_us; break;
    default: throw std::out_of_range("delay stage " + std::to_string(stage) + ": expected 0..5");
  }
}

void Engine::note(int kind, int row, int chunk, int worker, double begin_us, double end_us) {
  if (recording_) records_.push_back({kind, row, chunk, worker, begin_us, end_us});
}

void Engine::record(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = on;
}

int Engine::take_records(TaskRecord* out, int capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LaneRecord> unfinished;
  for (LaneRecord& lane : lane_records_) {
    if (!lane.end->done()) {
      unfinished.push_back(lane);
      continue;
    }
    records_.push_back({lane.kind, lane.row, lane.chunk, 0, lane.begin->time_us(), lane.end->time_us()});
  }
  lane_records_ = std::move(unfinished);
  const int n = std::min<int>(capacity, static_cast<int>(records_.size()));
  std::copy(records_.begin(), records_.begin() + n, out);
  records_.erase(records_.begin(), records_.begin() + n);
  return n;
}

double Engine::cpu_update_us(int row) {
  std::lock_guard<std::mutex> lock(mutex_);
  return at(row).last_busy_us;
}

}  // namespace hytrain_fx
