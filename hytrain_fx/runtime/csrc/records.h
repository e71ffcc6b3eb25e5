// What has run when, for a timeline: tasks of workers, and of lanes as their events tell.
#pragma once

#include <atomic>
#include <vector>

#include "device.h"
#include "locks.h"
#include "native_structs.h"

namespace hytrain_fx {

// The kinds of a TaskRecord.
enum RecordKind : int32_t { kToHost = 0, kCpuUpdate = 1, kDeviceUpdate = 2, kToDevice = 3, kStatesIn = 6, kStatesOut = 7 };

class Records {
 public:
  explicit Records(int workers) : running_(workers, -1) {}

  bool on() const { return on_; }  // also without the lock
  void turn(bool on) { on_ = on; }
  // A worker takes one granule after the other; of one row they make one record. `workers` share
  // the updates.
  void note_update(int row, int chunk, int worker, int workers, double begin_us, double end_us);
  // For several chunks together: the first. For several rows together: each with its part of the
  // time between the events, `from` and `to` between 0 and 1.
  void note_lane(RecordKind kind, int row, int chunk, const EventPtr& begin, const EventPtr& end, double from = 0, double to = 1);
  // Called without the lock, which is `mutex`.
  int take(TaskRecord* out, int capacity, Device& device, EngineMutex& mutex);

 private:
  struct LaneRecord {
    RecordKind kind;
    int row, chunk;
    EventPtr begin, end;
    double from, to;
  };
  std::vector<TaskRecord> take_done_lanes(Device& device, EngineMutex& mutex);

  std::atomic<bool> on_{false};
  std::vector<TaskRecord> records_;
  std::vector<int> running_;  // by worker: its last record, -1 for none
  std::vector<LaneRecord> lanes_;
};

}  // namespace hytrain_fx
