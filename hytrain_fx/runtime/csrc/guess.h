// What is guessed of a row's factors. clip_grad_norm_ and GradScaler scale gradients by a number
// that the device has only when the whole backward has run. Mostly it is the same number: 1 where
// nothing is clipped, or 1 / scale. So, once that has held for some steps, rows are updated while
// the backward still runs, with the factors that last came twice running (guesses.h).
#pragma once

#include <array>
#include <cstdint>

#include "shared_limits.h"

namespace hytrain_fx {

class Guess {
 public:
  using Values = std::array<float, kMaxFactors>;

  int count() const { return count_; }  // of factors at the last commit
  // Whether it pays to use the likely factors.
  bool is_steady() const;
  // For the step that begins: the likely factors.
  void make() { guessed_ = likely_; }
  // The factors of a commit have come, `count` of them.
  void learn(const Values& values, int count, bool skipped);

  float guessed(int factor) const { return guessed_[factor]; }
  float known(int factor) const { return known_[factor]; }
  bool is(int factor, float value) const;  // to the bit
  bool is_right(int count) const;          // of the factors that are known now

 private:
  Values guessed_{};
  Values known_{};   // of the last commit: later ones use the slots again
  Values likely_{};  // the last values that came twice running
  int count_ = 0;
  uint32_t same_ = 0;  // whether commits had the likely factors: a bit each, the latest lowest
  int outcomes_ = 0;   // bits that count
};

}  // namespace hytrain_fx
