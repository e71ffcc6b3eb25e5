#include "guesses.h"

namespace hytrain_fx {

// New weights that were sent on a wrong guess are read while their copies run, and written again
// after that. Returns, with the lock held, when none is on its way.
void Guesses::await_wrongly_sent(const FactorLanding& landing, EngineLock& lock) {
  for (std::vector<EventPtr> sent;; sent.clear()) {
    for (Row& row : state_.rows) {
      if (!row.awaits_factors_of(landing.commit) || !row.is_guessing()) continue;
      bool wrong = landing.leaves_out();
      for (int i = 0; i < row.n_factors; ++i) wrong |= !row.guess.is(i, landing.values[row.factors[i]]);
      for (int c = 0; wrong && c < row.size(); ++c) {
        state_.ahead.erase(row.key(c));
        const EventPtr& ahead = row.chunks[c].ahead;
        if (ahead && !ahead->known_done()) sent.push_back(ahead);
      }
    }
    if (sent.empty()) return;
    lock.unlock();
    for (const EventPtr& event : sent) event->sync();
    lock.lock();
  }
}

void Guesses::factors_came(const FactorLanding& landing, EngineLock& lock) {
  await_wrongly_sent(landing, lock);
  const int64_t redone = counts_.redone;
  bool guessed = false;
  for (Row& row : state_.rows) {
    if (!row.awaits_factors_of(landing.commit)) continue;
    const bool was_guessing = row.is_guessing();
    row.take_factors(landing.values, landing.leaves_out());
    if (was_guessing) settle(row, false);
    guessed |= was_guessing;
    if (row.is_skipped()) updates_.leave_out(row);
    state_.queue_ready(row);
  }
  slots_.came(landing);
  counts_.commits += guessed;
  counts_.missed += counts_.redone > redone;
}

void Guesses::settle(Row& row, bool at_commit) {
  const bool right = !row.is_skipped() && row.guess.is_right(row.n_factors);
  for (int c = 0; c < row.size(); ++c) {
    const Chunk& chunk = row.chunks[c];
    if (chunk.guessed == 0 || chunk.is_withdrawn()) continue;
    const int64_t params = chunk.guessed_params();
    if (row.is_early()) early_.count(row, params, !right && at_commit);
    if (!at_commit) {
      counts_.params += params;
      counts_.redone += right ? 0 : params;
    }
    if (right) {
      updates_.finish(row.key(c));
    } else {
      settle_wrong(row, c);
    }
  }
}

void Guesses::settle_wrong(Row& row, int c) {
  Chunk& chunk = row.chunks[c];
  const Key key = row.key(c);
  state_.ready.erase(key);
  state_.ahead.erase(key);
  if (chunk.ahead) {
    chunk.ahead->sync();  // it has come: await_wrongly_sent()
    chunk.ahead = nullptr;
    chunk.send_back = row.is_skipped();
  }
  updates_.take_back(chunk, key);
}

GuessCounts Guesses::counts() const {
  GuessCounts counts = counts_;
  counts.shadow_bytes = state_.shadows.most_bytes();
  return counts;
}

}  // namespace hytrain_fx
