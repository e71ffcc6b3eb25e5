#include "device_updates.h"

#include <map>

namespace hytrain_fx {
namespace {

// a launch of so many takes the device longer than the host
constexpr int64_t kLaunchParams = 16 << 20;

}  // namespace

void DeviceUpdates::launch(const std::vector<const CommitItem*>& items, const EventPtr& end, const float* skip) {
  for (const Launch& together : launches(items)) launch_together(together, end, skip);
}

// By launch and in the order of the launches. A unit's rows of one kernel go together, the last
// unit first: its gradients come first. Rows that were released together with rows of other units,
// at the end of a backward graph, go separately: otherwise they would hold back the large weights
// of their unit until then. They come after the others, lowest unit first, which is the order in
// which they are due now.
std::vector<DeviceUpdates::Launch> DeviceUpdates::launches(const std::vector<const CommitItem*>& items) const {
  std::map<const Event*, std::set<int>> units;
  for (const CommitItem* item : items) units[row_of(item).released.get()].insert(row_of(item).spec.unit);
  std::map<std::pair<int, int>, Launch> early, late;  // by -unit and dtype, by dtype and unit
  for (const CommitItem* item : items) {
    const Row& row = row_of(item);
    const int unit = row.spec.unit, dtype = 2 * row.spec.dtype + row.has_copy() + (row.device.states.width == kWideState ? 0 : 16);
    if (units[row.released.get()].size() > 1) {
      late[{dtype, unit}].push_back(item);
    } else {
      early[{-unit, dtype}].push_back(item);
    }
  }
  std::vector<Launch> found;
  for (auto& [key, group] : early) found.push_back(std::move(group));
  int64_t params = kLaunchParams;  // of the last launch; small ones are joined to it
  int joined_dtype = -1;
  for (auto& [key, group] : late) {
    if (key.first != joined_dtype || params >= kLaunchParams) {
      found.emplace_back();
      params = 0;
    }
    joined_dtype = key.first;
    for (const CommitItem* item : group) params += row_of(item).spec.numel;
    found.back().insert(found.back().end(), group.begin(), group.end());
  }
  return found;
}

// All after one event: queues of streams are short, and a full one blocks the launching thread.
void DeviceUpdates::launch_together(const Launch& items, const EventPtr& end, const float* skip) {
  Device& device = *state_.device;
  std::set<EventPtr> awaited;
  std::vector<DeviceUpdate> updates;
  for (const CommitItem* item : items) {
    const Row& row = row_of(item);
    awaited.insert(item->at_end || !row.ready || skip ? end : row.ready);
    awaited.insert(row.released);
    updates.push_back({item->grad, row.device_grad_dtype(), row.weight_dtype(), row.device.master, nullptr, row.device.states,
                       row.weight_bytes() == 2 ? row.spec.weight : nullptr, row.spec.numel,
                       item->scalars, skip});
  }
  for (const EventPtr& event : awaited) device.wait(Lane::UPDATE, event);
  EventPtr before = state_.records.on() ? device.record(Lane::UPDATE) : nullptr;
  device.update(Lane::UPDATE, updates);
  EventPtr after = device.record(Lane::UPDATE);
  if (before) note(items, before, after);
  for (const CommitItem* item : items) {
    Row& row = state_.rows[item->row];
    row.give_weight(after);
    row.phase = Phase::PENDING;
    row.issued = row.size();
  }
}

// Rows of several units may be in one launch: each takes as much of its time as of its parameters.
void DeviceUpdates::note(const Launch& items, const EventPtr& before, const EventPtr& after) {
  double all = 0, done = 0;  // parameters
  for (const CommitItem* item : items) all += static_cast<double>(row_of(item).spec.numel);
  if (all == 0) all = 1;
  for (const CommitItem* item : items) {
    const double from = done / all;
    done += static_cast<double>(row_of(item).spec.numel);
    state_.records.note_lane(kDeviceUpdate, item->row, 0, before, after, from, done / all);
  }
}

}  // namespace hytrain_fx
