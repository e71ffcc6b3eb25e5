#include "engine_state.h"

#include <algorithm>

namespace hytrain_fx {

EngineState::EngineState(const EngineOptions& options)
    : options(options),
      device(options.device_ordinal < 0 ? make_cpu_device()
                                        : make_cuda_device(options.device_ordinal, options.update_functions, options.gather_function)),
      records(options.workers) {
  this->options.timeout_s = std::min(options.timeout_s, kLongestWaitS);
}

Row& EngineState::row(int index) {
  if (index < 0 || index >= static_cast<int>(rows.size())) throw std::out_of_range("row " + std::to_string(index) + " is not in the table");
  return rows[index];
}

const Row* EngineState::opens_last() const {
  const Row* last = nullptr;
  for (const Key& key : streaming) {
    const Row& of = rows[key.row];
    if (!last || of.open_mark > last->open_mark) last = &of;
  }
  return last;
}

void EngineState::queue_ready(Row& row) {
  for (int c = 0; c < row.size(); ++c) queue_ready(row, c);
}

void EngineState::queue_ready(Row& row, int chunk) {
  if (!row.may_be_queued() || !row.chunks[chunk].is(ChunkState::LANDED)) return;
  row.chunks[chunk].set_state(ChunkState::QUEUED);
  ready.insert(row.key(chunk));
  work_cv.notify_all();
}

void EngineState::fail(const std::string& message) {
  std::lock_guard lock(mutex);
  note_failure(message);
}

void EngineState::note_failure(const std::string& message) {
  if (failure.empty()) failure = message;
  raise_all_flags();
  issued_cv.notify_all();
}

void EngineState::throw_if_failed() {
  if (!failure.empty()) throw std::runtime_error("the engine has failed: " + failure);
}

void EngineState::raise_all_flags() {
  for (Row& row : rows) {
    for (Chunk& chunk : row.chunks) {
      if (chunk.awaits_flag()) __atomic_store_n(chunk.flag, chunk.raised, __ATOMIC_RELEASE);
    }
  }
}

void EngineState::notify_all() {
  landed_cv.notify_all();
  work_cv.notify_all();
  upload_cv.notify_all();
  issued_cv.notify_all();
}

}  // namespace hytrain_fx
