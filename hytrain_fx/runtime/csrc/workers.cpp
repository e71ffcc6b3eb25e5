#include "workers.h"

#include <pthread.h>
#include <sched.h>

namespace hytrain_fx {
namespace {

// Where the system refuses, the thread runs wherever it is put, as it does without pinning.
void pin_thread(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

Workers::Workers(EngineState& state, Updates& updates, Homeward& homeward)
    : state_(state), updates_(updates), homeward_(homeward) {
  const EngineOptions& options = state.options;
  if (options.worker_cores) cores_.assign(options.worker_cores, options.worker_cores + options.workers);
}

void Workers::run(int worker) {
  set_arithmetic();
  if (!cores_.empty()) pin_thread(cores_[worker]);
  EngineLock lock(state_.mutex);
  while (true) {
    state_.work_cv.wait(lock, [this, worker] {
      return state_.stop || ((may_update(worker) || !homeward_.is_empty()) && !state_.has_failed());
    });
    if (state_.stop) return;
    if (may_update(worker)) {
      update(worker, *state_.ready.begin(), lock);
    } else {
      homeward_.carry(lock);
    }
  }
}

void Workers::update(int worker, const Key& ready, EngineLock& lock) {
  const Key key = ready;
  Row& row = state_.row(key);
  Chunk& chunk = state_.chunk(key);
  Task task;
  if (!updates_.take(key, task)) return;
  const int workers = sharing();
  lock.unlock();
  const double begin_us = state_.device->now_us();
  sleep_us(state_.provoked.worker_delay_us);
  if (state_.provoked.update_fails_in == key.row) throw std::runtime_error("injected failure in row " + std::to_string(key.row));
  run_task(row, chunk, task);
  const double end_us = state_.device->now_us();
  lock.lock();
  row.busy_us += (end_us - begin_us) / workers;
  state_.clock.worked(begin_us, end_us, workers, chunk.granule_params(task.granule));
  state_.records.note_update(key.row, key.chunk, worker, workers, begin_us, end_us);
  ++chunk.finished;
  updates_.finish(key);
}

}  // namespace hytrain_fx
