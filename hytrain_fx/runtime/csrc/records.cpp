#include "records.h"

#include <algorithm>
#include <iterator>

namespace hytrain_fx {
namespace {

constexpr double kPauseUs = 20;  // between two granules of one record

}  // namespace

void Records::note_update(int row, int chunk, int worker, int workers, double begin_us, double end_us) {
  if (!on_) return;
  int& last = running_[worker];
  if (last >= 0 && records_[last].row == row && records_[last].workers == workers && begin_us - records_[last].end_us < kPauseUs) {
    records_[last].end_us = end_us;
    return;
  }
  last = static_cast<int>(records_.size());
  records_.push_back({kCpuUpdate, row, chunk, worker, workers, begin_us, end_us});
}

void Records::note_lane(RecordKind kind, int row, int chunk, const EventPtr& begin, const EventPtr& end, double from, double to) {
  lanes_.push_back({kind, row, chunk, begin, end, from, to});
}

// The driver is asked several times for each, which takes long while copies are launched: no lock
// is held then.
std::vector<TaskRecord> Records::take_done_lanes(Device& device, EngineMutex& mutex) {
  std::vector<LaneRecord> lanes;
  {
    std::lock_guard lock(mutex);
    lanes.swap(lanes_);
  }
  const auto undone = std::stable_partition(lanes.begin(), lanes.end(), [](const LaneRecord& lane) { return lane.end->done(); });
  if (undone != lanes.begin()) device.take_epoch();
  std::vector<TaskRecord> done;
  for (auto lane = lanes.begin(); lane != undone; ++lane) {
    const double begin_us = lane->begin->time_us(), all_us = lane->end->time_us() - begin_us;
    done.push_back({lane->kind, lane->row, lane->chunk, 0, 1, begin_us + lane->from * all_us, begin_us + lane->to * all_us});
  }
  std::lock_guard lock(mutex);
  lanes_.insert(lanes_.end(), std::make_move_iterator(undone), std::make_move_iterator(lanes.end()));
  return done;
}

int Records::take(TaskRecord* out, int capacity, Device& device, EngineMutex& mutex) {
  const std::vector<TaskRecord> lanes = take_done_lanes(device, mutex);
  std::lock_guard lock(mutex);
  records_.insert(records_.end(), lanes.begin(), lanes.end());
  const int n = std::min<int>(capacity, static_cast<int>(records_.size()));
  std::copy(records_.begin(), records_.begin() + n, out);
  records_.erase(records_.begin(), records_.begin() + n);
  std::fill(running_.begin(), running_.end(), -1);
  return n;
}

}  // namespace hytrain_fx
