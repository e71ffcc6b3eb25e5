// Updates before the factors of their gradients are known. clip_grad_norm_ and GradScaler scale gradients by a number that the device has only
// when the whole backward has run, and mostly it is the same number: 1 where nothing is clipped, 1 / scale. So, once that has been so for
// some steps, rows are updated with the factors that last came twice running, while the backward still runs. GradScaler's word whether the step
// counts at all comes the same way: it is taken to count until then.
//
// The states as they were stay where they are (engine_shadow.cpp), and the gradient in its slot. Where the factors are others, it is updated
// again from there: bit for bit what it would have been without. New weights leave the host ahead of the factors, but only when the step is
// committed: nobody may see them on the device before.
#include <algorithm>
#include <bitset>
#include <cstring>

#include "engine.h"

namespace hytrain_fx {
namespace {

constexpr int kRemembered = 16, kLeastOutcomes = 2;
constexpr double kLeastSame = 0.6;  // share of commits with the likely factors from which a guess pays: a miss costs what a hit gains

}  // namespace

// Whether the row can be updated on a guess, and that is worth its shadows.
bool Engine::may_be_redone(const Row& row) const {
  if (!can_guess_ || row.spec.numel < kLeastGuessed || (row.host.max_exp_avg_sq && shadow_arrays_ < 4)) return false;
  return weight_bytes(row) == 4 || row.host.low;  // no place beside is kept for a new weight that is apart from its master
}

// Whether it pays to go by the row's likely factors.
bool Engine::is_steady(const Row& row) {
  if (row.outcomes < kLeastOutcomes) return row.n_values == 0;
  const uint32_t remembered = row.outcomes < kRemembered ? (1u << row.outcomes) - 1 : (1u << kRemembered) - 1;
  return static_cast<double>(std::bitset<32>(row.same & remembered).count()) >= kLeastSame * std::min(row.outcomes, kRemembered);
}

bool Engine::may_guess(const Row& row, int n_factors) const {
  return n_factors == row.n_values && may_be_redone(row) && is_steady(row);
}

// New weights that were sent on a wrong guess are read while their copies run, and written again after. Returns, with the lock held, when none
// is on its way.
void Engine::await_wrongly_sent(const Landing& landing, bool skipped, EngineLock& lock) {
  for (std::vector<EventPtr> sent;; sent.clear()) {
    for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
      const Row& row = rows_[r];
      if (row.phase != Phase::PENDING || row.factors_known || row.commit != landing.commit || !row.guessing) continue;
      bool wrong = skipped;
      for (int i = 0; i < row.n_factors; ++i) {
        wrong |= std::memcmp(&row.guess[i], &landing.factors[row.factors[i]], sizeof(float)) != 0;
      }
      for (int c = 0; wrong && c < static_cast<int>(row.chunks.size()); ++c) {
        ahead_.erase({row.spec.unit, r, c});
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

void Engine::factors_came(const Landing& landing, EngineLock& lock) {
  const bool skipped = landing.skip >= 0 && landing.factors[landing.skip] != 0.0f;
  await_wrongly_sent(landing, skipped, lock);
  const int64_t redone = guesses_.redone;
  bool guessed = false;
  for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
    Row& row = rows_[r];
    if (row.phase != Phase::PENDING || row.factors_known || row.commit != landing.commit) continue;
    take_factors(row, landing.factors, skipped);
    row.factors_known = true;
    row.skipped = skipped;
    if (row.guessing) {
      guessed = true;
      settle_guess(row, r, false);
    }
    if (skipped) leave_out(row, r);
    queue_all_ready(row, r);
  }
  if (landing.skip >= 0) {
    skip_on_way_ = false;
    skipped_ = skipped;
  }
  guesses_.commits += guessed;
  guesses_.missed += guesses_.redone > redone;
  factors_on_way_[landing.commit % 2] = false;
  issued_cv_.notify_all();
}

// `at_commit`: what was guessed was there when step() came, so the loop was guessed wrong and not a factor.
void Engine::settle_guess(Row& row, int index, bool at_commit) {
  row.guessing = false;
  bool right = !row.skipped;
  for (int i = 0; i < row.n_factors; ++i) {
    right &= std::memcmp(&row.guess[i], &row.factor_values[i], sizeof(float)) == 0;
  }
  if (right && row.bad_guess) return note_failure("CPU update: " + nonfinite_message(index));
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    Chunk& chunk = row.chunks[c];
    if (chunk.guessed == 0 || chunk.put_back) continue;
    const Key key{row.spec.unit, index, c};
    const int64_t params = guessed_params(chunk);
    if (row.early) count_early(row, params, !right && at_commit);
    if (!at_commit) {
      guesses_.params += params;
      guesses_.redone += right ? 0 : params;
    }
    if (right) {
      finish_task(key);
      continue;
    }
    ready_.erase(key);
    ahead_.erase(key);
    if (chunk.ahead) {
      chunk.ahead->sync();  // it has come: await_wrongly_sent()
      chunk.ahead = nullptr;
      chunk.send_back = row.skipped;
    }
    chunk.queued = chunk.undo = true;
    finish_task(key);
  }
}

// The weight of a chunk that was updated on a guess may go to the device ahead of its factors, as the lane is idle then: nothing reads it there
// before wait(), which waits for them too, and what is updated again, or put back, is sent again behind it.
void Engine::offer_ahead(const Row& row, const Key& key) {
  if (row.phase != Phase::PENDING || !row.guessing || row.bad_guess) return;
  ahead_.insert(key);
  upload_cv_.notify_one();
}

// Of a row whose updates began before its commit, which comes now.
void Engine::offer_updated_ahead(const Row& row, int index) {
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    if (row.chunks[c].finished == row.chunks[c].granules) offer_ahead(row, {row.spec.unit, index, c});
  }
}

int64_t Engine::guessed_params(const Chunk& chunk) {
  return std::min<int64_t>(chunk.guessed * kGranule, chunk.end - chunk.begin);
}

void Engine::redo_guessed(const Key& key, Chunk& chunk) {
  chunk.undo = false;
  chunk.redo = 0;
  chunk.redo_end = chunk.guessed;
  chunk.finished -= chunk.redo_end;
  ready_.insert(key);
  work_cv_.notify_all();
}

// The step was left out: of chunks that nobody has begun nothing happens any more. Others are put back.
void Engine::leave_out(Row& row, int index) {
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    if (row.chunks[c].guessed > 0) continue;
    ready_.erase({row.spec.unit, index, c});
    chunk_left_out(row);
  }
}

void Engine::chunk_left_out(Row& row) {
  if (++row.issued == static_cast<int>(row.chunks.size())) issued_cv_.notify_all();
}

GuessCounts Engine::guess_counts() {
  std::lock_guard lock(mutex_);
  return guesses_;
}

}  // namespace hytrain_fx
