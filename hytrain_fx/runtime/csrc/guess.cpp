#include "guess.h"

#include <algorithm>
#include <bitset>
#include <cstring>

namespace hytrain_fx {
namespace {

constexpr int kRemembered = 16, kLeastOutcomes = 2;
// Share of commits with the likely factors from which a guess pays: a miss costs what a hit gains.
constexpr double kLeastSame = 0.6;

bool are_same(const Guess::Values& a, const Guess::Values& b) { return std::memcmp(a.data(), b.data(), sizeof a) == 0; }

}  // namespace

bool Guess::is_steady() const {
  if (outcomes_ < kLeastOutcomes) return count_ == 0;
  const int remembered = std::min(outcomes_, kRemembered);
  const std::bitset<32> same(same_ & ((1u << remembered) - 1));
  return static_cast<double>(same.count()) >= kLeastSame * remembered;
}

void Guess::learn(const Values& values, int count, bool skipped) {
  if (count != count_) outcomes_ = -1;
  same_ = same_ << 1 | (!skipped && are_same(values, likely_) ? 1u : 0u);
  // A value that came once, such as when one step of several is clipped, is not the next one's. So
  // a new loss scale is guessed wrong twice.
  if (++outcomes_ == 0 || are_same(values, known_)) likely_ = values;
  count_ = count;
  known_ = values;
}

bool Guess::is(int factor, float value) const { return std::memcmp(&guessed_[factor], &value, sizeof(float)) == 0; }

bool Guess::is_right(int count) const {
  return std::memcmp(guessed_.data(), known_.data(), static_cast<size_t>(count) * sizeof(float)) == 0;
}

}  // namespace hytrain_fx
