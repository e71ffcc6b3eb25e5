#include "lander.h"

#include <algorithm>

namespace hytrain_fx {
namespace {

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr int kPolls = 20;  // until the lock is taken again
constexpr double kAskAfterUs = 5e6;

}  // namespace

void Lander::expect(const std::vector<GradLanding>& landings) {
  for (const GradLanding& landing : landings) {
    ++state_.landings;
    for (const Part& part : landing.parts) {
      Row& row = state_.rows[part.row];
      row.landing = landing.event;
      row.landing_number = state_.landings;
      row.landing_mark = state_.marks;
    }
    landings_.push_back({landing, {}, nullptr});
    landings_.back().grads.mark = state_.marks;
  }
  state_.landed_cv.notify_one();
}

void Lander::expect(const FactorLanding& landing) {
  landings_.push_back({{}, landing, nullptr});
  state_.landed_cv.notify_one();
}

void Lander::expect_end(const EventPtr& event, uint64_t mark) {
  state_.backward_end.mark = mark;
  state_.backward_end.has_come = false;
  landings_.push_back({{}, {}, event, mark});
  state_.landed_cv.notify_one();
}

void Lander::run() {
  state_.device->bind_thread();
  EngineLock lock(state_.mutex);
  while (true) {
    state_.landed_cv.wait(lock, [this] { return state_.stop || !landings_.empty(); });
    if (state_.stop) return;
    const Landing landing = std::move(landings_.front());
    landings_.pop_front();
    const bool has_grads = !landing.grads.parts.empty();
    if (!await(*(landing.end ? landing.end : has_grads ? landing.grads.event : landing.factors.event), lock)) return;
    if (landing.end) {
      backward_ended(landing.end_mark);
    } else if (has_grads) {
      grads_came(landing.grads);
    } else {
      guesses_.factors_came(landing.factors, lock);
    }
  }
}

// False where the engine stops. Whoever launches may be blocked in the driver until an update that
// waits for this landing has raised its flag. So the driver, which would hold this thread up too, is
// asked only when nothing has come for long and no flag is awaited: for errors of the device.
bool Lander::await(Event& event, EngineLock& lock) {
  double asked_us = state_.device->now_us();
  while (!event.known_done()) {
    const bool ask = state_.flagged_rows == 0 && state_.device->now_us() - asked_us > kAskAfterUs;
    lock.unlock();
    for (int i = 0; i < kPolls && !event.seen(); ++i) std::this_thread::sleep_for(kPoll);
    if (ask && !event.known_done()) event.done();
    lock.lock();
    if (ask) asked_us = state_.device->now_us();
    if (state_.stop) return false;
  }
  if (state_.provoked.lander_delay_us > 0) {
    lock.unlock();
    sleep_us(state_.provoked.lander_delay_us);
    lock.lock();
  }
  return true;
}

// While a gradient is on its way, `landed_us` is of the one before.
void Lander::note_landed(Row& row) const {
  const bool is_whole = std::none_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) { return chunk.awaits_gradient(); });
  if (is_whole) row.landed_us = state_.device->now_us();
}

void Lander::backward_ended(uint64_t mark) const {
  BackwardEnd& end = state_.backward_end;
  if (end.landed_us > 0) {
    const double rest_us = state_.device->now_us() - end.landed_us;
    end.after_us = end.rest_us > 0 ? std::min(rest_us, end.rest_us) : rest_us;
    end.rest_us = rest_us;
  }
  end.landed_us = 0;
  end.has_come = end.mark == mark;  // else another has been committed
}

void Lander::grads_came(const GradLanding& landing) {
  const Part& first = landing.parts.front();
  state_.backward_end.landed_us = state_.device->now_us();
  state_.backward_end.landed_mark = landing.mark;
  if (landing.begin) state_.records.note_lane(kToHost, first.row, first.chunk, landing.begin, landing.event);
  for (const Part& part : landing.parts) {
    Row& row = state_.rows[part.row];
    Chunk& chunk = row.chunks[part.chunk];
    if (chunk.is(ChunkState::PROMISED) && row.promised == part.generation) {
      chunk.set_state(ChunkState::FLAGGED);
      state_.ready.insert(row.key(part.chunk));
      state_.work_cv.notify_all();
      note_landed(row);
      continue;
    }
    if (row.generation != part.generation) continue;  // dropped by zero_grad() and begun again
    // Dropped, and the row's last update may have ended since: its chunks are not this gradient's.
    if (row.phase == Phase::IDLE || row.phase == Phase::PASSED) continue;
    chunk.set_state(ChunkState::LANDED);
    note_landed(row);
    state_.queue_ready(row, part.chunk);
  }
}

}  // namespace hytrain_fx
