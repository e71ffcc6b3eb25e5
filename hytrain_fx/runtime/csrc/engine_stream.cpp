// The streamer: states that rest on the host are brought to the device chunk by chunk, updated there and taken back, beside the workers.
//
// Which chunk comes next is decided when a staging slot is free, not before: the lowest unit whose gradient is there, as everywhere;
// and where no gradient is there yet, the highest unit, whose gradient comes next, so that its states are on the device by then.
#include <chrono>

#include "engine.h"

namespace hytrain_fx {

void Engine::set_staging(const StagingMemory& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (StagingSlot& slot : staging_) {
    if (slot.stored) slot.stored->sync();
  }
  staging_.assign(memory.slots, {});
  for (int s = 0; s < memory.slots; ++s) {
    for (int a = 0; a < memory.arrays; ++a) staging_[s].at[a] = memory.base + (s * memory.arrays + a) * memory.slot_params;
  }
}

// The row whose next chunk goes first, -1 where none is committed.
int Engine::next_streamed() {
  EventPtr asked;
  for (const Key& key : streaming_) {
    const EventPtr& ready = rows_[key[1]].ready;
    if (ready == asked) continue;  // the rows of a unit share one event, and it is not done
    asked = ready;
    if (asked->done()) return key[1];
  }
  return streaming_.empty() ? -1 : (*streaming_.rbegin())[1];
}

Engine::StagingSlot* Engine::free_staging_slot() {
  for (StagingSlot& slot : staging_) {
    if (!slot.stored || slot.stored->done()) return &slot;
  }
  return nullptr;
}

void Engine::stream() {
  device_->bind_thread();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    stream_cv_.wait(lock, [this] { return stop_ || !streaming_.empty(); });
    if (stop_) return;
    StagingSlot* slot = free_staging_slot();
    if (!slot) {
      stream_cv_.wait_for(lock, std::chrono::microseconds(50));
      continue;
    }
    stream_chunk(next_streamed(), *slot, lock);
  }
}

void Engine::stream_chunk(int index, StagingSlot& slot, std::unique_lock<std::mutex>& lock) {
  Row& row = rows_[index];  // its phase is PENDING: nobody else changes what is read here
  const Chunk& chunk = row.chunks[row.streamed++];
  const int number = row.streamed - 1, chunks = static_cast<int>(row.chunks.size());
  if (row.streamed == chunks) streaming_.erase({row.spec.unit, index, 0});
  const bool recording = recording_;
  const int64_t n = chunk.end - chunk.begin, width = grad_bytes(row);
  const std::array<float*, 4> rest{row.host.master, row.host.exp_avg, row.host.exp_avg_sq, row.host.max_exp_avg_sq};
  lock.unlock();

  if (row.stored) device_->wait(Lane::STREAM_IN, row.stored);  // the last step's copy home
  EventPtr in_begin = recording ? device_->record(Lane::STREAM_IN) : nullptr;
  for (int a = 0; a < 4; ++a) {
    if (rest[a]) device_->copy(Lane::STREAM_IN, slot.at[a], rest[a] + chunk.begin, n * sizeof(float));
  }
  EventPtr in = device_->record(Lane::STREAM_IN);
  for (const EventPtr& event : {in, row.ready, row.released}) device_->wait(Lane::STREAM_UPDATE, event);
  EventPtr update_begin = recording ? device_->record(Lane::STREAM_UPDATE) : nullptr;
  device_->update(Lane::STREAM_UPDATE,
                  {{offset(row.grad, chunk.begin * width), static_cast<Dtype>(row.spec.dtype), slot.at[0], slot.at[1], slot.at[2],
                    rest[3] ? slot.at[3] : nullptr, offset(row.spec.weight, chunk.begin * width), n, row.scalars, nonfinite_of(index)}});
  EventPtr updated = device_->record(Lane::STREAM_UPDATE);
  device_->wait(Lane::STREAM_OUT, updated);
  EventPtr out_begin = recording ? device_->record(Lane::STREAM_OUT) : nullptr;
  for (int a = 0; a < 4; ++a) {
    if (rest[a]) device_->copy(Lane::STREAM_OUT, rest[a] + chunk.begin, slot.at[a], n * sizeof(float));
  }
  EventPtr out = device_->record(Lane::STREAM_OUT);

  lock.lock();
  slot.stored = out;
  if (recording) {
    lane_records_.push_back({6, index, number, in_begin, in});
    lane_records_.push_back({2, index, number, update_begin, updated});
    lane_records_.push_back({7, index, number, out_begin, out});
  }
  row.weight = updated;
  if (++row.issued == chunks) {
    row.stored = out;
    issued_cv_.notify_all();
  }
}

}  // namespace hytrain_fx
