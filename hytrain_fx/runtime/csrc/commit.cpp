#include "commit.h"

#include <algorithm>
#include <utility>

namespace hytrain_fx {
namespace {

// Whether every factor of the item is already in its slot, rather than on its way from the device.
bool are_known(const CommitItem& item, const void* const* factors) {
  return std::none_of(item.factors, item.factors + item.n_factors, [factors](int factor) { return factors[factor]; });
}

}  // namespace

void Commit::run(const CommitItem* items, int n, const void* const* factors, int n_factors, int skip, void* stream) {
  if (n_factors > state_.options.factor_capacity) throw std::logic_error("internal: more factors than slots");
  EventPtr end = state_.device->record_compute(stream);
  const double called_us = state_.device->now_us();
  EngineLock lock(state_.mutex);
  await_last_step(lock);
  state_.throw_if_failed();
  float* const slots = parts_.slots.next_half();
  const float* const skip_at = skip < 0 ? nullptr : static_cast<const float*>(factors[skip]);
  for (int i = 0; i < n; ++i) check(items[i]);  // all of them before anything is changed
  const bool on_lane = bring(slots, factors, n_factors, end, lock);
  begin_step(called_us);
  std::vector<const CommitItem*> on_device;
  ++state_.marks;  // of `end`
  for (int i = 0; i < n; ++i) {
    release(items[i], end);
    switch (state_.row(items[i].row).place) {
      case Place::DEVICE: on_device.push_back(&items[i]); break;
      case Place::STREAMED: parts_.visits.begin(state_.row(items[i].row), items[i], end, skip_at); break;
      default: begin_on_host(items[i], factors, slots, skip_at != nullptr);
    }
  }
  parts_.early.give_up_all();
  if (std::exchange(state_.goes_ahead, false)) state_.work_cv.notify_all();
  parts_.on_device.launch(on_device, end, skip_at);
  const bool any_lands = std::any_of(items, items + n, [this](const CommitItem& item) { return state_.row(item.row).on_host(); });
  if (any_lands && !on_lane) state_.device->wait(Lane::D2H, end);  // else the lane has waited for it
  const EventPtr behind = any_lands || on_lane ? state_.device->record_shown(Lane::D2H) : nullptr;
  if (on_lane) parts_.lander.expect({behind, slots, n_factors, state_.commits, skip});
  if (any_lands) parts_.lander.expect_end(behind, state_.marks);
  parts_.slots.on_way(on_lane, skip_at != nullptr);
  ++state_.commits;
  state_.upload_cv.notify_one();
}

// The device may wait for a worker, which wants the lock: a copy that holds up this thread goes
// without it.
bool Commit::bring(float* slots, const void* const* factors, int n_factors, const EventPtr& end, EngineLock& lock) {
  if (!state_.options.slots_unpinned) return parts_.slots.bring(slots, factors, n_factors, end);
  lock.unlock();
  const bool on_lane = parts_.slots.bring(slots, factors, n_factors, end);
  lock.lock();
  await_last_step(lock);
  state_.throw_if_failed();
  return on_lane;
}

// Returns when no update may still change what begins here again, and another thread's drain()
// carries no states.
void Commit::await_last_step(EngineLock& lock) {
  do {
    parts_.homeward.carry_all(lock);
    parts_.tail.await_end(lock);
  } while (!parts_.homeward.are_all_home());
}

void Commit::begin_step(double called_us) {
  state_.clock.begin_step(called_us, state_.device->now_us(), has_ended(), parts_.tail.is_followed());
  parts_.tally.begin_commit();
}

// Whether every update that is committed is on its way.
bool Commit::has_ended() const {
  const auto is_on_way = [](const Row& row) { return row.phase == Phase::PENDING && !row.is_issued(); };
  return std::none_of(state_.rows.begin(), state_.rows.end(), is_on_way);
}

void Commit::check(const CommitItem& item) {
  const Row& row = state_.row(item.row);
  if (!row.has_states_for(item.scalars)) throw std::logic_error(row.name() + " is committed with amsgrad and has no state for it");
  if (!row.on_host()) {
    if (row.phase == Phase::PENDING) throw std::runtime_error(row.name() + " is committed while its last update is in flight");
    if (!item.grad) throw std::logic_error(row.name() + " is updated on the device and is committed without its gradient");
    return;
  }
  if (row.phase != Phase::GRAD && row.phase != Phase::EARLY) throw std::runtime_error(row.name() + " is committed without a gradient");
  if (!row.is_armed(Arm::CPU) || !row.is_armed(Arm::RELOAD)) {
    throw std::runtime_error("dropped node: " + row.name() + " was offloaded but its " + (row.is_armed(Arm::CPU) ? "reload" : "cpu_step") +
                             " node did not run");
  }
}

// At the latest with the commit: for a row that no node has released, or that was touched since.
void Commit::release(const CommitItem& item, const EventPtr& end) {
  Row& row = state_.row(item.row);
  if (!item.at_end && row.released) return;
  row.released = end;
  row.open_at(end, state_.marks);
}

void Commit::begin_on_host(const CommitItem& item, const void* const* factors, const float* slots, bool may_skip) {
  Row& row = state_.row(item.row);
  parts_.tally.count_landed(row);
  const bool foreseen = row.was_foreseen(item);
  if (row.phase == Phase::EARLY && !foreseen) parts_.early.give_up(row);
  row.begin_update(item, state_.commits);
  const bool known = !may_skip && are_known(item, factors);
  if (known) {
    row.take_factors(slots, false);
    if (foreseen) parts_.guesses.settle(row, true);
  } else {
    row.factors_are = foreseen || parts_.guesses.may_guess(row, item.n_factors) ? Factors::GUESSED : Factors::AWAITED;
  }
  parts_.tally.count_waiting(row);
  state_.queue_ready(row);
  if (foreseen && !known) parts_.updates.offer_updated_ahead(row);
}

}  // namespace hytrain_fx
