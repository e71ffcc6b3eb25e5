// A lane that is slower while the backward runs than what was seen of it says. Units are updated half
// by the CPU and half streamed; their gradients come from the last one to the first. Plans an order,
// plays it at the lane's true rates, tells what came of it, and so on. Prints for each step
// how long after the backward the weights of the first unit came, when the last ones came, how long
// the lane had nothing to copy, all in milliseconds, and the rate that was planned with, as a share of
// the seen one. Compiled and run by tests/cpu/test_lane_pace.py with the lane's true share.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lane_order.h"

using namespace hytrain_fx;

namespace {

constexpr int kUnits = 27, kVisits = 3, kSlots = 6, kSteps = 24;
constexpr double kUnitUs = 9e3, kEndsUs = kUnits * kUnitUs, kSeen = 22e3, kParamsPerUs = 2.3e3;
constexpr double kVisitBytes = 47e6, kWeightBytes = 29e6, kParams = 14e6;

struct Played {
  double first_unit_us = 0, last_us = 0, idle_us = 0, took_us = 0;
};

std::vector<LaneItem> items_of_a_step() {
  std::vector<LaneItem> items;
  for (int32_t unit = 0; unit < kUnits; ++unit) {
    const double landed_us = (kUnits - unit) * kUnitUs;
    items.push_back({{unit, 2 * unit, 0}, false, kWeightBytes, kParams, landed_us, landed_us});
    for (int32_t chunk = 0; chunk < kVisits; ++chunk) items.push_back({{unit, 2 * unit + 1, chunk}, true, kVisitBytes, 0, landed_us, landed_us});
  }
  return items;
}

// As the engine does it: the lane keeps to the order, workers take what has landed in that order.
Played play(const std::vector<LaneItem>& items, const LaneOrder& order, const LaneRates& rates) {
  std::vector<double> ready(items.size());
  std::vector<size_t> left = order.items;
  left.erase(std::remove_if(left.begin(), left.end(), [&](size_t i) { return items[i].is_states; }), left.end());
  for (double cpu_us = 0; !left.empty();) {
    auto next = std::find_if(left.begin(), left.end(), [&](size_t i) { return items[i].landed_us <= cpu_us; });
    if (next == left.end()) {
      next = std::min_element(left.begin(), left.end(), [&](size_t a, size_t b) { return items[a].landed_us < items[b].landed_us; });
    }
    cpu_us = std::max(cpu_us, items[*next].landed_us) + items[*next].params / rates.params_per_us;
    ready[*next] = cpu_us;
    left.erase(next);
  }
  Played found;
  double lane_us = 0, first_us = 0;
  for (size_t place = 0; place < order.items.size(); ++place) {
    const LaneItem& item = items[order.items[place]];
    const double begin_us = std::max(lane_us, item.is_states ? item.landed_us : ready[order.items[place]]);
    const double rate = begin_us < kEndsUs ? rates.bytes_per_us_in_backward : rates.bytes_per_us;
    found.idle_us += begin_us - lane_us;
    lane_us = begin_us + item.bytes / rate;
    if (item.key.unit == 0) found.first_unit_us = std::max(found.first_unit_us, lane_us - kEndsUs);
    if (place == 0) first_us = lane_us;
    if (place + 1 == order.in_backward) found.took_us = lane_us - first_us;
  }
  found.last_us = lane_us;
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  const double share = count > 1 ? std::atof(arguments[1]) : 1;
  const LaneRates truly{kParamsPerUs, kSeen, share * kSeen, kEndsUs};
  const std::vector<LaneItem> items = items_of_a_step();
  BackwardRate learnt;
  learnt.saw(kSeen, 0, 0);
  for (int step = 0; step < kSteps; ++step) {
    const LaneOrder order = lane_order(items, {kParamsPerUs, kSeen, learnt.bytes_per_us(kSeen), kEndsUs}, kSlots, 0);
    const Played played = play(items, order, truly);
    std::printf("%.1f %.1f %.1f %.3f\n", played.first_unit_us / 1e3, played.last_us / 1e3, played.idle_us / 1e3, learnt.bytes_per_us(kSeen) / kSeen);
    learnt.saw(0, order.planned_us, played.took_us);
  }
  return 0;
}
