// Updates before the factors of their gradients are known, and what happens when those come.
//
// Rows are updated with the likely factors (guess.h) while the backward still runs; the step is
// assumed to count. The old states stay where they are (shadow_arena.h), and the gradient in its
// slot. If the factors turn out different, the row is updated again from there: the result is the
// same, bit for bit, as without a guess. New weights leave the host ahead of the factors, but only
// once the step is committed: nobody may see them on the device before.
#pragma once

#include "early_tally.h"
#include "factor_slots.h"
#include "updates.h"

namespace hytrain_fx {

class Guesses {
 public:
  Guesses(EngineState& state, Updates& updates, FactorSlots& slots, EarlyTally& early)
      : state_(state), updates_(updates), slots_(slots), early_(early) {}

  bool may_guess(const Row& row, int n_factors) const {
    return n_factors == row.guess.count() && state_.shadows.suits(row) && row.guess.is_steady();
  }
  // The factors of a commit are in their slots.
  void factors_came(const FactorLanding& landing, EngineLock& lock);
  // The factors of a row that was updated on a guess are known. `at_commit`: they were known when
  // step() came, so the loop was guessed wrong and not a factor.
  void settle(Row& row, bool at_commit);
  void count_sent(const Chunk& chunk) { counts_.sent += chunk.params(); }  // ahead of its factors
  GuessCounts counts() const;

 private:
  void await_wrongly_sent(const FactorLanding& landing, EngineLock& lock);
  void settle_wrong(Row& row, int chunk);

  EngineState& state_;
  Updates& updates_;
  FactorSlots& slots_;
  EarlyTally& early_;
  GuessCounts counts_{};
};

}  // namespace hytrain_fx
