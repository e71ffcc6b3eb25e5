// What the inserted nodes call: gradients out, stages armed, weights released and waited for. Also eager reads and close.
#include <algorithm>
#include <exception>

#include "engine.h"

namespace hytrain_fx {
namespace {

// Slots in a slab and gradients in the ring stand this far apart; runtime/states/slabs.py pads alike.
int64_t padded(int64_t bytes) { return (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes; }

struct SlotCopy {  // a gradient on its way back
  char* dst;
  const char* slot;
  int64_t bytes;
};

// Gradients that stand as far apart where they go as in their slots are one copy, with the padding between them.
void add_copy(std::vector<SlotCopy>& copies, const SlotCopy& next) {
  if (!copies.empty()) {
    SlotCopy& last = copies.back();
    const int64_t apart = next.dst - last.dst;
    if (apart == padded(last.bytes) && next.slot == last.slot + apart) {
      last.bytes = apart + next.bytes;
      return;
    }
  }
  copies.push_back(next);
}

}  // namespace

// ---- called by the nodes of the backward graph ----

void Engine::grad_offload(const int32_t* rows, const void* const* grads, int n, void* stream) {
  std::vector<Part> parts;
  {
    EngineLock lock(mutex_);
    withdraw(rows, n, lock);
    throw_if_failed();
    for (int i = 0; i < n; ++i) begin_gradient(at(rows[i]), rows[i], grads[i], parts);
  }
  // A unit goes as one piece where it fits: each takes five places or more in the compute stream's queue, which blocks the launching thread
  // where it is full. Not under the lock: on a CPU these calls are the copies. Only the launching thread changes a row in this phase.
  int64_t all = 0;
  for (const Part& part : parts) all += padded(part.bytes);
  const auto most = static_cast<int64_t>(all <= static_cast<int64_t>(ring_.largest()) ? ring_.largest() : ring_.half());
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    int64_t bytes = 0;
    while (last < parts.size() && (last == first || bytes + padded(parts[last].bytes) <= most)) {
      bytes += padded(parts[last++].bytes);
    }
    copy_piece(parts, first, last, stream);
    first = last;
  }
}

void Engine::begin_gradient(Row& row, int index, const void* grad, std::vector<Part>& parts) {
  if (row.place != Place::HOST) throw std::logic_error("row " + std::to_string(index) + " offloads a gradient but is not placed on the host");
  if (row.phase == Phase::PENDING && !row.passed) {
    throw std::runtime_error("row " + std::to_string(index) + " has a new gradient while its last update is in flight: its wait node did not run");
  }
  ++row.generation;
  row.armed_cpu = row.armed_reload = false;
  if (row.passed) {
    row.next_gradient = true;
    ++finish_.ahead;
  } else {
    row.phase = Phase::GRAD;
    begin_chunks(row);
  }
  const int64_t size = slot_grad_bytes(row);
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    const Chunk& chunk = row.chunks[c];
    parts.push_back({index, c, row.generation, offset(grad, chunk.begin * size), offset(row.host.slot, chunk.begin * size),
                     (chunk.end - chunk.begin) * size});
  }
}

void Engine::begin_chunks(Row& row) {
  row.issued = 0;
  for (Chunk& chunk : row.chunks) {
    chunk.taken = chunk.finished = chunk.redo = chunk.redo_end = 0;
    chunk.landed = chunk.queued = chunk.undo = false;
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
  std::lock_guard lock(mutex_);
  for (const Landing& landing : landings) {
    for (const Part& part : landing.parts) rows_[part.row].landing = landing.event;
  }
  landings_.insert(landings_.end(), landings.begin(), landings.end());
  landed_cv_.notify_one();
}

void Engine::keep_grads(void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream) {
  std::vector<DeviceCopy> copies;
  for (int i = 0; i < n; ++i) {
    if (bytes[i] > 0) copies.push_back({kept[i], grads[i], bytes[i]});
  }
  device_->gather(stream, copies);
}

void Engine::arm_cpu(const int32_t* rows, int n) {
  std::lock_guard lock(mutex_);
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    if (row.place != Place::HOST) continue;
    row.armed_cpu = true;
    queue_all_ready(row, rows[i]);
  }
}

void Engine::arm_gpu(const int32_t* rows, int n, void* stream) {
  EventPtr event = device_->record_compute(stream);
  std::lock_guard lock(mutex_);
  ++marks_;
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    if (row.place == Place::HOST) continue;
    row.ready = row.open = event;
    row.open_mark = marks_;
  }
}

void Engine::arm_reload(const int32_t* rows, int n) {
  std::lock_guard lock(mutex_);
  for (int i = 0; i < n; ++i) at(rows[i]).armed_reload = true;
  if (!updated_.empty()) upload_cv_.notify_one();
}

void Engine::release(const int32_t* rows, int n, void* stream) {
  EventPtr event = device_->record_compute(stream);
  std::lock_guard lock(mutex_);
  const double now_us = device_->now_us();
  launching_us_ += launched_since(now_us);
  launched_us_ = now_us;
  ++marks_;
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    row.released = row.open = event;
    row.open_mark = marks_;
  }
  if (!updated_.empty()) upload_cv_.notify_one();
}

// ---- called by the wait nodes, by eager reads, by close ----

void Engine::wait(const int32_t* rows, int n, void* stream) {
  EventPtr reloaded;
  uint64_t issue = 0;
  std::set<EventPtr> updated;
  {
    EngineLock lock(mutex_);
    throw_if_failed();
    for (int i = 0; i < n; ++i) {
      Row& row = at(rows[i]);
      finish_wait(row, rows[i], lock);
      // The stream reads the weight from here on: a release before this point is not its last one, and commit() makes up for it.
      row.released = nullptr;
      // Another thread may have settled the row: then nobody has made this stream wait for what that thread still waits for.
      if (!row.weight || (row.awaited && row.awaited_on == stream)) continue;
      row.awaited = true;
      row.awaited_on = stream;
      if (row.weight->known_done()) continue;
      if (row.place != Place::HOST) {
        updated.insert(row.weight);
        if (row.sends_weight && row.stored) updated.insert(row.stored);  // the caller may write to the weight, which still goes home
      } else if (!reloaded || row.issue > issue) {
        reloaded = row.weight;
        issue = row.issue;
      }
    }
  }
  if (reloaded) device_->compute_wait(stream, reloaded);
  for (const EventPtr& event : updated) device_->compute_wait(stream, event);
  std::lock_guard lock(mutex_);
  throw_if_failed();  // flags go up then, too: where the calling thread is the compute stream it has waited for them
}

void Engine::drain(const int32_t* rows, int n) {
  std::exception_ptr failed;
  try {
    settle(rows, n);
  } catch (...) {
    failed = std::current_exception();
  }
  EngineLock lock(mutex_);
  bring_home(rows, n, lock);
  if (failed) std::rethrow_exception(failed);
}

void Engine::settle(const int32_t* rows, int n) {
  {
    EngineLock lock(mutex_);
    withdraw(rows, n, lock);
    end_flagged(lock);
  }
  for (int i = 0; i < n; ++i) {
    EngineLock lock(mutex_);
    throw_if_failed();
    Row& row = at(rows[i]);
    finish_wait(row, rows[i], lock);
    // Also where a wait() has passed: that made the compute stream wait, not the host. Of a step that was left out it is the old weight's, sent
    // back, or of a step before; and states may still be on their way home.
    EventPtr weight = row.weight, stored = row.stored;
    lock.unlock();
    if (weight) weight->sync();
    if (stored) stored->sync();
    lock.lock();
    throw_if_failed();  // flags go up then, too: what has come is an old weight, or a part of a new one
  }
}

// Several threads may wait for one row. The first that wakes ends the step for it, and the launching thread may begin the next one before the
// others wake: they leave the row as they find it.
void Engine::finish_wait(Row& row, int index, EngineLock& lock) {
  if (row.phase != Phase::PENDING || row.passed) return;
  const int chunks = static_cast<int>(row.chunks.size());
  const uint64_t commit = row.commit;
  auto is_over = [&] { return row.phase != Phase::PENDING || row.passed || row.commit != commit; };
  auto issued = [&] { return is_over() || row.issued == chunks || !failure_.empty(); };
  ++waiting_;
  upload_cv_.notify_one();
  const bool in_time = issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), issued);
  --waiting_;
  if (!in_time) {
    throw std::runtime_error("row " + std::to_string(index) + ": " + std::to_string(row.issued) + " of " + std::to_string(chunks) +
                             " chunks of its new weight were on their way after " + std::to_string(options_.timeout_s) + " s");
  }
  throw_if_failed();
  if (is_over()) return;
  row.released = row.ready = row.open = nullptr;
  row.grad = nullptr;
  passed_us_ = launched_us_ = device_->now_us();
  launching_us_ = 0;
  row.passed = row.flagged > 0;
  if (!row.passed) row.phase = Phase::IDLE;
}

// On a lane of its own, though two lanes to the device starve each other (engine_upload.cpp): in a backward that finds gradients in slots the
// forward has waited for all weights. Only those of a part of the model that it did not run may still be on their way.
uint64_t Engine::fetch(const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream) {
  std::vector<SlotCopy> copies;
  std::set<EventPtr> landings;
  {
    EngineLock lock(mutex_);
    end_flagged(lock);
    throw_if_failed();
    int64_t begin = 0;
    for (int i = 0; i < n; ++i) {
      const Row& row = at(rows[i]);  // an update leaves the gradient in the slot
      if (row.place != Place::HOST || !row.landing) {
        throw std::runtime_error("row " + std::to_string(rows[i]) + " has no gradient to bring back");
      }
      const int64_t bytes = row.spec.numel * slot_grad_bytes(row);
      if (begin + bytes > dst_bytes) throw std::logic_error("row " + std::to_string(rows[i]) + " does not fit where its gradient is to be brought");
      add_copy(copies, {offset(dst, begin), offset(row.host.slot, 0), bytes});
      landings.insert(row.landing);
      begin += padded(bytes);
    }
  }
  device_->wait(Lane::FETCH, device_->record_compute(stream));  // earlier work may still use the memory: allocators hand it out ahead of the stream
  for (const EventPtr& landing : landings) device_->wait(Lane::FETCH, landing);
  for (const SlotCopy& copy : copies) device_->copy(Lane::FETCH, copy.dst, copy.slot, static_cast<size_t>(copy.bytes));
  EventPtr end = device_->record(Lane::FETCH);
  std::lock_guard lock(mutex_);
  fetches_[++fetch_count_] = last_fetch_ = end;
  return fetch_count_;
}

void Engine::fetched(uint64_t fetch, void* stream) {
  EventPtr end;
  {
    std::lock_guard lock(mutex_);
    const auto found = fetches_.find(fetch);
    if (found == fetches_.end()) throw std::logic_error("fetch " + std::to_string(fetch) + " was never begun, or has been waited for");
    end = found->second;
    fetches_.erase(found);
  }
  device_->compute_wait(stream, end);
}

void Engine::discard(const int32_t* rows, int n) {
  EngineLock lock(mutex_);
  withdraw(rows, n, lock);
  for (int i = 0; i < n; ++i) {
    Row& row = at(rows[i]);
    row.next_gradient = false;
    if (row.phase == Phase::GRAD) row.phase = Phase::IDLE;
  }
}

bool Engine::pending(int row) {
  std::lock_guard lock(mutex_);
  return at(row).phase == Phase::PENDING && !at(row).passed;
}

}  // namespace hytrain_fx
