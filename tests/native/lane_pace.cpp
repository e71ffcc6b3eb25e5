// What the lane's plan does in a loop that learns from each step, as the engine has it. Of each unit
// one chunk is updated by the CPU, the rest is streamed; gradients come from the last unit to the
// first. Each step plans an order with the rates learnt before (LearntRates), plays it at the lane's
// true rates, and looks at it as the engine does (LaneProgress). Arguments are NAME=VALUE. Prints for
// each step, in milliseconds, by how much the next forward is held up and when the lane has ended
// after the backward, then the rate that was planned with in the backward as a share of the true one.
// Compiled and run by tests/cpu/test_lane_pace.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lane_progress.h"

using namespace hytrain_fx;

namespace {

constexpr int kUnits = 27, kSlots = 6;
constexpr double kTrueRate = 22e3, kParamsPerUs = 2.3e3, kLookedApartUs = 160;

struct Loop {
  double steps = 24, unit_us = 9e3, forward_us = 3e3;  // of a unit
  double share = 1;                                    // of its rate that the lane has in the backward
  double visits = 3, visit_mb = 47, weight_mb = 29;    // of a unit
  double weights = 1;                                  // chunks that its weights are updated in
  double late_us = 0;                                  // when the lane is looked at first
  double foreseen = 1;                                 // when gradients are to land, as a share of when they do
  double cpu_share = 1;                                // of its rate in the step before that the CPU has
  double other_at = 1e9, other_share = 1, other_visits = 3, other_visit_mb = 47, other_weight_mb = 29;  // from that step on
  double ends_us() const { return kUnits * unit_us; }
  double rate(double at_us) const { return at_us < ends_us() ? share * kTrueRate : kTrueRate; }
};

class Comes : public Event {  // at a time on a clock of ours
 public:
  Comes(double at_us, const double& now_us) : at_us_(at_us), now_us_(now_us) {}
  double time_us() override { return at_us_; }

 private:
  bool query() override { return at_us_ <= now_us_; }
  void await() override {}
  double at_us_;
  const double& now_us_;
};

std::vector<LaneItem> items_of_a_step(const Loop& loop, double foreseen) {
  std::vector<LaneItem> items;
  for (int32_t unit = 0; unit < kUnits; ++unit) {
    const double landed_us = foreseen * (kUnits - unit) * loop.unit_us;
    for (int32_t chunk = 0; chunk < loop.weights; ++chunk) {
      const double bytes = 1e6 * loop.weight_mb / loop.weights;
      items.push_back({{unit, 2 * unit, chunk}, false, bytes, bytes / 2, landed_us, landed_us});
    }
    for (int32_t chunk = 0; chunk < loop.visits; ++chunk) {
      items.push_back({{unit, 2 * unit + 1, chunk}, true, 1e6 * loop.visit_mb, 0, landed_us, landed_us});
    }
  }
  return items;
}

// Workers take what has landed in the lane's order.
std::vector<double> updated_us(const Loop& loop, const std::vector<LaneItem>& items, const LaneOrder& order) {
  std::vector<double> updated(items.size());
  std::vector<size_t> left;
  std::copy_if(order.items.begin(), order.items.end(), std::back_inserter(left), [&](size_t i) { return !items[i].is_states; });
  for (double cpu_us = 0; !left.empty();) {
    auto next = std::find_if(left.begin(), left.end(), [&](size_t i) { return items[i].landed_us <= cpu_us; });
    if (next == left.end()) {
      next = std::min_element(left.begin(), left.end(), [&](size_t a, size_t b) { return items[a].landed_us < items[b].landed_us; });
    }
    cpu_us = std::max(cpu_us, items[*next].landed_us) + items[*next].params / (loop.cpu_share * kParamsPerUs);
    updated[*next] = cpu_us;
    left.erase(next);
  }
  return updated;
}

struct Played {
  std::vector<double> came_us;  // on the device, in the lane's order
  double held_us = 0;           // how much later the next forward ends than after a lane that takes no time
};

// The lane keeps to the order. States are brought ahead of their gradients, to slots that earlier ones leave.
Played play(const Loop& loop, const std::vector<LaneItem>& items, const LaneOrder& order) {
  const std::vector<double> updated = updated_us(loop, items, order);
  std::vector<double> free_us(kSlots), there_us(kUnits);
  size_t visits = 0;
  double lane_us = 0, out_us = 0;
  Played played;
  for (size_t i : order.items) {
    const LaneItem& item = items[i];
    double& slot_us = free_us[visits % kSlots];
    const double begin_us = std::max(lane_us, item.is_states ? slot_us : updated[i]), copied_us = item.bytes / loop.rate(begin_us);
    lane_us = begin_us + copied_us;
    played.came_us.push_back(lane_us);
    there_us[item.key.unit] = std::max({there_us[item.key.unit], lane_us, item.landed_us});
    if (!item.is_states) continue;
    slot_us = out_us = std::max({lane_us, item.landed_us, out_us}) + copied_us;
    ++visits;
  }
  double at_us = loop.ends_us();
  for (int unit = 0; unit < kUnits; ++unit) at_us = std::max(at_us, there_us[unit]) + loop.forward_us;
  played.held_us = at_us - loop.ends_us() - kUnits * loop.forward_us;
  return played;
}

LaneProgress looked_at(const Loop& loop, const std::vector<LaneItem>& items, const LaneOrder& order, const Played& played) {
  double now_us = 0;
  LaneProgress lane(order, 0, loop.foreseen * loop.ends_us());
  for (size_t place = 0; place < order.items.size(); ++place) {
    const LaneItem& item = items[order.items[place]];
    lane.add({std::make_shared<Comes>(played.came_us[place], now_us), static_cast<int64_t>(item.bytes), 1, item.is_states, true, nullptr});
  }
  for (now_us = loop.late_us + kLookedApartUs; lane.places() > 0; now_us += kLookedApartUs) lane.look(now_us);
  return lane;
}

Loop loop_of(int count, char** arguments) {
  Loop loop;
  const std::map<std::string, double*> values{
      {"steps", &loop.steps}, {"weights", &loop.weights}, {"unit_us", &loop.unit_us}, {"share", &loop.share}, {"visits", &loop.visits},
      {"visit_mb", &loop.visit_mb}, {"weight_mb", &loop.weight_mb}, {"late_us", &loop.late_us}, {"foreseen", &loop.foreseen}, {"cpu_share", &loop.cpu_share},
      {"other_at", &loop.other_at}, {"other_share", &loop.other_share}, {"other_visits", &loop.other_visits},
      {"other_visit_mb", &loop.other_visit_mb}, {"other_weight_mb", &loop.other_weight_mb}};
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const size_t at = argument.find('=');
    *values.at(argument.substr(0, at)) = std::stod(argument.substr(at + 1));
  }
  return loop;
}

}  // namespace

int main(int count, char** arguments) {
  Loop loop = loop_of(count, arguments);
  LearntRates learnt;
  for (int step = 0; step < loop.steps; ++step) {
    if (step == loop.other_at) {
      loop.share = loop.other_share;
      loop.visits = loop.other_visits;
      loop.visit_mb = loop.other_visit_mb;
      loop.weight_mb = loop.other_weight_mb;
    }
    const std::vector<LaneItem> items = items_of_a_step(loop, 1);
    const double in_backward = learnt.bytes_per_us_in_backward(), ends_us = loop.foreseen * loop.ends_us();
    const LaneRates rates{kParamsPerUs, learnt.bytes_per_us(), in_backward, ends_us};
    const LaneOrder order = lane_order(items_of_a_step(loop, loop.foreseen), rates, kSlots, 0);
    const Played played = play(loop, items, order);
    const double last_us = *std::max_element(played.came_us.begin(), played.came_us.end());
    std::printf("%.1f %.1f %.4f\n", played.held_us / 1e3, (last_us - loop.ends_us()) / 1e3, in_backward / (loop.share * kTrueRate));
    const LaneProgress lane = looked_at(loop, items, order, played);
    learnt.saw(lane, lane.late(loop.ends_us()));
  }
  return 0;
}
