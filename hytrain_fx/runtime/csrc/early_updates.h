// Updates before step(). In a loop that waits for the device between backward() and step()
// (loss.item(), a norm that is printed) nothing would be updated until the whole backward has run.
// So, where such a loop has been learned (session/foresight.py), each row is committed on a guess
// as soon as its gradient is on the way. The guess takes the hyper-parameters that its group has
// then, and the likely factors (guess.h). Rows of a loop whose factors are guessed anyway are
// committed so too: they would wait for step() only.
//
// Such a row is EARLY: workers update it like a row with guessed factors (guesses.h), the gradient
// in its slot, no weight to the device. commit() with the same numbers makes it a guessed row, or
// lets it go at once where no factor is on its way. A commit with other numbers, or without the
// row, puts it back, bit for bit. So does whoever asks for its states or gradient before.
#pragma once

#include "guesses.h"

namespace hytrain_fx {

class EarlyUpdates {
 public:
  EarlyUpdates(EngineState& state, Updates& updates, Guesses& guesses, EarlyTally& tally)
      : state_(state), updates_(updates), guesses_(guesses), tally_(tally) {}

  // A guess at the next commit. Rows for which it would not pay, or for which there is no shadow
  // memory, wait for their commit.
  void begin(const int32_t* rows, int n, const UpdateScalars& scalars);
  // The row keeps its gradient and nothing else, as before begin(). What was updated is put back
  // while the caller goes on.
  void give_up(Row& row);
  void give_up_all();
  // Returns when no update of these rows is ahead of its commit, and states are as the last commit
  // left them; or when the engine has failed.
  void withdraw(const int32_t* rows, int n, EngineLock& lock);

 private:
  EngineState& state_;
  Updates& updates_;
  Guesses& guesses_;
  EarlyTally& tally_;
};

}  // namespace hytrain_fx
