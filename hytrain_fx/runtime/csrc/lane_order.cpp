#include "lane_order.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

namespace hytrain_fx {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Items that become ready one after the other, and of those that are, the lowest unit.
class Waiting {
 public:
  explicit Waiting(const std::vector<LaneItem>& items) : items_(items) {}
  void add(double ready_us, size_t item) { later_.insert({ready_us, items_[item].key, item}); }
  void advance(double now_us) {
    for (; !later_.empty() && std::get<0>(*later_.begin()) <= now_us; later_.erase(later_.begin())) {
      ready_.insert({items_[std::get<2>(*later_.begin())].key, std::get<2>(*later_.begin())});
    }
  }
  bool is_empty() const { return ready_.empty() && later_.empty(); }
  bool has_ready() const { return !ready_.empty(); }
  double next_us() const { return later_.empty() ? kNever : std::get<0>(*later_.begin()); }
  const Key& lowest() const { return ready_.begin()->first; }
  // Of what is ready the lowest unit, else what is ready next.
  size_t take() {
    size_t item = 0;
    if (has_ready()) {
      item = ready_.begin()->second;
      ready_.erase(ready_.begin());
    } else {
      item = std::get<2>(*later_.begin());
      later_.erase(later_.begin());
    }
    return item;
  }

 private:
  const std::vector<LaneItem>& items_;
  std::set<std::tuple<double, Key, size_t>> later_;
  std::set<std::pair<Key, size_t>> ready_;
};

// When the CPU has updated each item: one after the other, as all workers share a chunk.
std::vector<double> updated_us(const std::vector<LaneItem>& items, double params_per_us, double now_us) {
  std::vector<double> updated(items.size(), now_us);
  Waiting landing(items);
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_states && items[i].params > 0) landing.add(items[i].landed_us, i);
  }
  double at_us = now_us;
  while (!landing.is_empty()) {
    landing.advance(at_us);
    if (!landing.has_ready()) {
      at_us = std::max(at_us, landing.next_us());
      continue;
    }
    const size_t item = landing.take();
    if (params_per_us > 0) at_us += items[item].params / params_per_us;
    updated[item] = at_us;
  }
  return updated;
}

}  // namespace

LaneOrder lane_order(const std::vector<LaneItem>& items, const LaneRates& rates, int slots, double now_us) {
  const std::vector<double> updated = updated_us(items, rates.params_per_us, now_us);
  const auto copied_us = [&rates](double bytes, double at_us) {
    return bytes / (at_us < rates.backward_ends_us ? rates.bytes_per_us_in_backward : rates.bytes_per_us);
  };
  Waiting weights(items), states(items);
  double longest = 0;  // visit: a weight stands so much later than it is ready, and the lane seldom waits for a worker
  for (const LaneItem& item : items) {
    if (item.is_states) longest = std::max(longest, item.bytes);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].is_states) {
      states.add(items[i].landed_us, i);
    } else {
      const double ready_us = std::max(updated[i], items[i].released_us);
      weights.add(ready_us + (items[i].params > 0 ? copied_us(longest, ready_us) : 0), i);
    }
  }
  std::multiset<double> free_us;  // staging slots
  for (int slot = 0; slot < slots; ++slot) free_us.insert(now_us);
  LaneOrder found;
  std::vector<size_t>& order = found.items;
  order.reserve(items.size());
  for (double at_us = now_us; order.size() < items.size();) {
    if (at_us <= rates.backward_ends_us && order.size() > found.in_backward && items[order.back()].is_states) {
      found.in_backward = order.size();
      found.planned_us = at_us - now_us;
    }
    weights.advance(at_us);
    states.advance(at_us);
    const bool has_slot = !states.is_empty() && !free_us.empty() && *free_us.begin() <= at_us;
    const bool is_before = states.has_ready() && (!weights.has_ready() || states.lowest() < weights.lowest());
    if (has_slot && (is_before || !weights.has_ready())) {
      order.push_back(states.take());
      const LaneItem& visit = items[order.back()];
      const double took_us = copied_us(visit.bytes, at_us);
      at_us += took_us;
      free_us.erase(free_us.begin());
      free_us.insert(std::max(at_us, visit.landed_us) + took_us);  // they go back as fast as they came
    } else if (weights.has_ready()) {
      order.push_back(weights.take());
      at_us += copied_us(items[order.back()].bytes, at_us);
    } else {
      const double slot_us = states.is_empty() || free_us.empty() ? kNever : *free_us.begin();
      const double next_us = std::min(weights.next_us(), slot_us);
      if (next_us == kNever) {  // states, and nowhere to bring them: the caller has no such rows
        order.push_back(states.take());
      } else {
        at_us = std::max(at_us, next_us);
      }
    }
  }
  return found;
}

}  // namespace hytrain_fx
