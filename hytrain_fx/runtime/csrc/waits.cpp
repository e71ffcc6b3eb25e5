#include "waits.h"

#include <exception>
#include <utility>
#include <vector>

namespace hytrain_fx {

void Waits::wait(const int32_t* rows, int n, void* stream) {
  EventPtr reloaded;
  uint64_t issue = 0;
  std::set<EventPtr> updated;
  std::vector<std::pair<Row*, EventPtr>> awaited;
  awaited.reserve(n);
  {
    EngineLock lock(state_.mutex);
    state_.throw_if_failed();
    for (int i = 0; i < n; ++i) {
      Row& row = state_.row(rows[i]);
      finish(row, lock);
      // The stream reads the weight from here on: a release before this point is not its last one,
      // and commit() makes up for it. Not where another thread has ended the step and begun the next.
      if (row.phase != Phase::PENDING) row.released = nullptr;
      // Another thread may have settled the row: then nobody has made this stream wait for what
      // that thread still waits for.
      if (!row.weight || row.awaited_on == stream) continue;
      awaited.emplace_back(&row, row.weight);
      // The caller may write to the weight, which may go home still when its update is known to be over.
      const EventPtr& stored = row.streamed.stored;
      if (!row.on_host() && row.streamed.sends_weight && stored && !stored->known_done()) updated.insert(stored);
      if (row.weight->known_done()) continue;
      if (!row.on_host()) {
        updated.insert(row.weight);
      } else if (!reloaded || row.issue > issue) {
        reloaded = row.weight;
        issue = row.issue;
      }
    }
  }
  if (reloaded) state_.device->compute_wait(stream, reloaded);
  for (const EventPtr& event : updated) state_.device->compute_wait(stream, event);
  std::lock_guard lock(state_.mutex);
  // Only now: a second thread on this stream must not go on before the waits are on it.
  for (auto& [row, weight] : awaited) {
    if (row->weight == weight) row->awaited_on = stream;
  }
  // Flags go up then, too: if the calling thread is the compute stream it has waited for them.
  state_.throw_if_failed();
}

void Waits::drain(const int32_t* rows, int n) {
  std::exception_ptr failed;
  try {
    settle(rows, n);
  } catch (...) {
    failed = std::current_exception();
  }
  EngineLock lock(state_.mutex);
  homeward_.bring(rows, n, lock);
  if (failed) std::rethrow_exception(failed);
}

void Waits::settle(const int32_t* rows, int n) {
  {
    EngineLock lock(state_.mutex);
    early_.withdraw(rows, n, lock);
    tail_.await_end(lock);
  }
  for (int i = 0; i < n; ++i) {
    EngineLock lock(state_.mutex);
    state_.throw_if_failed();
    Row& row = state_.row(rows[i]);
    finish(row, lock);
    // Also where a wait() has passed: that made the compute stream wait, not the host. If a step
    // was left out, it is the event of the old weight, sent back, or of a step before. States may
    // still be on their way home.
    EventPtr weight = row.weight, stored = row.streamed.stored;
    lock.unlock();
    if (weight) weight->sync();
    if (stored) stored->sync();
    lock.lock();
    // Flags go up then, too: what has come is an old weight, or a part of a new one.
    state_.throw_if_failed();
  }
}

template <class Done>
void Waits::await_issued(Row& row, EngineLock& lock, Done issued) {
  ++state_.waiting;
  ++row.awaited;
  state_.upload_cv.notify_one();
  const bool in_time = state_.issued_cv.wait_for(lock, std::chrono::duration<double>(state_.options.timeout_s), issued);
  --row.awaited;
  --state_.waiting;
  if (in_time) return;
  throw std::runtime_error(row.name() + ": " + std::to_string(row.issued) + " of " + std::to_string(row.size()) +
                           " chunks of its new weight were on their way after " + std::to_string(state_.options.timeout_s) + " s");
}

// Several threads may wait for one row. The first that wakes ends the step for it, and the
// launching thread may begin the next one before the others wake. So they leave the row as they
// find it.
void Waits::finish(Row& row, EngineLock& lock) {
  if (row.phase != Phase::PENDING) return;
  const uint64_t commit = row.commit;
  auto is_over = [&] { return row.phase != Phase::PENDING || row.commit != commit; };
  auto issued = [&] { return is_over() || row.is_issued() || state_.has_failed(); };
  if (!issued()) await_issued(row, lock, issued);
  state_.throw_if_failed();
  if (is_over()) return;
  row.released = row.ready = row.open = nullptr;
  row.streamed.grad = nullptr;
  state_.clock.passed(state_.device->now_us());
  row.phase = row.flagged > 0 ? Phase::PASSED : Phase::IDLE;
}

}  // namespace hytrain_fx
