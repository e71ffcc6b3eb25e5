// The threads between a gradient and its update: lander and workers.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.h"

namespace hytrain_fx {
namespace {

// Where the system refuses, the thread runs wherever it is put, as without pinning.
void pin_thread(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

void Engine::queue_all_ready(Row& row, int index) {
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) queue_if_ready(row, index, c);
}

void Engine::queue_if_ready(Row& row, int index, int chunk) {
  Chunk& c = row.chunks[chunk];
  if ((row.phase != Phase::PENDING && row.phase != Phase::EARLY) || row.passed || !row.armed_cpu || row.skipped) return;
  if (!(row.factors_known || row.guessing) || !c.landed || c.queued) return;
  c.queued = true;
  ready_.insert({row.spec.unit, index, chunk});
  work_cv_.notify_all();
}

void Engine::land() {
  device_->bind_thread();
  EngineLock lock(mutex_);
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
      factors_came(landing, lock);
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
  set_arithmetic();
  if (!worker_cores_.empty()) pin_thread(worker_cores_[index]);
  EngineLock lock(mutex_);
  while (true) {
    work_cv_.wait(lock, [this] { return stop_ || ((!ready_.empty() || !homeward_.empty()) && failure_.empty()); });
    if (stop_) return;
    if (ready_.empty()) {
      carry_home(lock);
      continue;
    }
    const Key key = *ready_.begin();
    Row& row = rows_[key[1]];
    Chunk& chunk = row.chunks[key[2]];
    Task task;
    if (!take_task(key, task)) continue;
    lock.unlock();
    const double begin_us = device_->now_us();
    sleep_us(worker_delay_us_);
    if (fail_row_ == key[1]) throw std::runtime_error("injected failure in row " + std::to_string(key[1]));
    const bool finite = run_task(row, chunk, task);
    const double end_us = device_->now_us();
    lock.lock();
    row.busy_us += (end_us - begin_us) / options_.workers;
    count_busy(begin_us, end_us);
    note_update(key[1], key[2], index, begin_us, end_us);
    const bool counts = row.phase == Phase::PENDING && row.factors_known && !row.skipped && !chunk.put_back;
    if (!finite && counts) throw std::runtime_error(nonfinite_message(key[1]));
    row.bad_guess |= !finite;
    ++chunk.finished;
    finish_task(key);
  }
}

void Engine::count_busy(double begin_us, double end_us) {
  begin_us = std::max(begin_us, commit_us_);  // one ahead of its commit, or late after the one before
  if (workers_busy_us_ == 0) first_update_us_ = begin_us;
  workers_busy_us_ += (end_us - begin_us) / options_.workers;
}

// The next granule of a chunk that is ready; false, with the chunk set aside until its factors are known, where there is no shadow for it.
bool Engine::take_task(const Key& key, Task& task) {
  Row& row = rows_[key[1]];
  Chunk& chunk = row.chunks[key[2]];
  task = {0, false, chunk.redo < chunk.redo_end, row.skipped || chunk.put_back, {}, row.scalars};
  if (task.again) {
    task.granule = chunk.redo++;
  } else {
    task.guessed = !row.factors_known;
    Shadow& shadow = chunk.shadows[chunk.taken];
    if (task.guessed && !shadow.slot && shadows_.empty()) {
      ready_.erase(key);
      chunk.queued = false;
      return false;
    }
    if (task.guessed && !shadow.slot) shadow.slot = take_shadow();
    chunk.guessed += task.guessed;
    task.granule = chunk.taken++;
  }
  task.shadow = chunk.shadows[task.granule];
  if ((chunk.taken == chunk.granules || task.restore) && chunk.redo == chunk.redo_end) ready_.erase(key);
  for (int i = 0; i < row.n_factors; ++i) {
    task.scalars.factors[i] = task.guessed ? row.guess[i] : row.factor_values[i];
  }
  task.scalars.factor_count = static_cast<uint32_t>(row.n_factors);
  if (row.copied) task.scalars.flags |= kWideFactors;
  return true;
}

void Engine::finish_task(const Key& key) {
  Row& row = rows_[key[1]];
  Chunk& chunk = row.chunks[key[2]];
  if (chunk.undo && chunk.finished == chunk.taken) redo_guessed(key, chunk);
  if (chunk.put_back) {
    if (!chunk.undo && chunk.finished == chunk.taken) chunk_was_put_back(key);
    return;
  }
  if (chunk.finished < (row.skipped ? chunk.taken : chunk.granules)) return;
  if (!row.factors_known) return offer_ahead(row, key);
  ahead_.erase(key);
  settle_shadows(chunk, !row.skipped);
  if (row.skipped && !chunk.send_back) return chunk_left_out(row);
  chunk.send_back = false;
  if (chunk.ahead) {
    weight_was_sent(row, chunk.ahead, chunk.ahead_issue);
    chunk.ahead = nullptr;
  } else if (!chunk.flagged) {
    updated_.insert(key);
  }
  const double now_us = device_->now_us();
  finish_.cpu_us = now_us - commit_us_;
  finish_.cpu_paused_us = now_us - first_update_us_ - workers_busy_us_;
  finish_.cpu_begun_us = std::max(first_update_us_ - commit_us_, 0.0);  // before the commit: on a guess
  if (chunk.flagged) end_flagged_chunk(row, chunk);
  upload_cv_.notify_one();
}

bool Engine::run_task(Row& row, const Chunk& chunk, const Task& task) {
  const int64_t begin = chunk.begin + task.granule * kGranule, n = std::min(kGranule, chunk.end - begin);
  if (task.again) restore_master(row, begin, n, task.shadow.slot);
  return task.restore || update_on_host(row, begin, n, task);
}

bool Engine::update_on_host(Row& row, int64_t begin, int64_t n, const Task& task) {
  char* const slot = offset(row.host.slot, begin * slot_grad_bytes(row));
  char* const master = offset(row.host.master, begin * master_bytes(row));
  char* const kept = task.guessed ? task.shadow.slot : nullptr;
  const HostArrays home = home_of(row, begin);
  if (task.shadow.slot) {
    const HostArrays beside = arrays_in(row, task.shadow.slot);
    const bool holds = task.shadow.holds;
    return adamw_beside(slot, row.grad_dtype, master, kept, holds ? beside : home, holds ? home : beside, n, task.scalars);
  }
  if (row.host.low) {
    return split_adamw_chunk<true>(slot, row.grad_dtype, reinterpret_cast<uint16_t*>(master), home.low, home.m, home.v, home.vmax, n, task.scalars);
  }
  void* const out = weight_bytes(row) == 2 ? offset(row.host.out, begin * 2) : nullptr;
  return adamw_chunk<true>(slot, row.grad_dtype, reinterpret_cast<float*>(master), home.m, home.v, home.vmax, out, weight_dtype(row), n, task.scalars);
}

}  // namespace hytrain_fx
