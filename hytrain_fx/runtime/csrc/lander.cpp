#include "lander.h"

namespace hytrain_fx {

void Lander::expect(const std::vector<GradLanding>& landings) {
  for (const GradLanding& landing : landings) {
    for (const Part& part : landing.parts) state_.rows[part.row].landing = landing.event;
    landings_.push_back({landing, {}});
  }
  state_.landed_cv.notify_one();
}

void Lander::expect(const FactorLanding& landing) {
  landings_.push_back({{}, landing});
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
    lock.unlock();
    (has_grads ? landing.grads.event : landing.factors.event)->sync();
    sleep_us(state_.provoked.lander_delay_us);
    lock.lock();
    if (has_grads) {
      grads_came(landing.grads);
    } else {
      guesses_.factors_came(landing.factors, lock);
    }
  }
}

void Lander::grads_came(const GradLanding& landing) {
  const Part& first = landing.parts.front();
  if (landing.begin) state_.records.note_lane(kToHost, first.row, first.chunk, landing.begin, landing.event);
  for (const Part& part : landing.parts) {
    Row& row = state_.rows[part.row];
    if (row.generation != part.generation) continue;  // dropped by zero_grad() and begun again
    // Dropped, and the row's last update may have ended since: its chunks are not this gradient's.
    if (row.phase == Phase::IDLE || row.phase == Phase::PASSED) continue;
    row.chunks[part.chunk].set_state(ChunkState::LANDED);
    state_.queue_ready(row, part.chunk);
  }
}

}  // namespace hytrain_fx
