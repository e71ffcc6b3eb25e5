#include "factor_slots.h"

namespace hytrain_fx {

float* FactorSlots::await_next() {
  EngineLock lock(state_.mutex);
  const int half = static_cast<int>(state_.commits % 2);
  state_.await(lock, "the factors of the step before the last had not come", [&] { return !on_way_[half] || state_.has_failed(); });
  state_.throw_if_failed();
  return half_of(state_.commits);
}

bool FactorSlots::await_skipped() {
  EngineLock lock(state_.mutex);
  state_.await(lock, "whether the last step was left out had not come", [&] { return !skip_on_way_ || state_.has_failed(); });
  state_.throw_if_failed();
  return skipped_;
}

bool FactorSlots::knows_skipped() {
  EngineLock lock(state_.mutex);
  return !skip_on_way_;
}

float* FactorSlots::next_half() const {
  if (on_way_[state_.commits % 2]) throw std::logic_error("internal: the slots for factors are in use");
  if (skip_on_way_) throw std::logic_error("internal: a commit before it is known whether the last one was left out");
  return half_of(state_.commits);
}

bool FactorSlots::bring(float* slots, const void* const* factors, int count, const EventPtr& end) {
  bool any = false;
  for (int i = 0; i < count; ++i) {
    if (!factors[i]) continue;
    if (!any) state_.device->wait(Lane::D2H, end);
    any = true;
    state_.device->copy(Lane::D2H, slots + i, factors[i], sizeof(float));
  }
  return any;
}

void FactorSlots::on_way(bool any, bool skip) {
  if (any) on_way_[state_.commits % 2] = true;
  skip_on_way_ = skip;
}

void FactorSlots::came(const FactorLanding& landing) {
  if (landing.skip >= 0) {
    skip_on_way_ = false;
    skipped_ = landing.leaves_out();
  }
  on_way_[landing.commit % 2] = false;
  state_.issued_cv.notify_all();
}

}  // namespace hytrain_fx
