// The C interface's structs; runtime/native/structs.py mirrors them field by field.
#pragma once

#include <cstdint>

#include "device.h"

namespace hytrain_fx {

struct RowSpec {
  int64_t numel;
  int32_t unit;
  int32_t dtype;  // Dtype of the weight; also its gradient's, except with a copy (`use_copy`)
  void* weight;
};

struct HostStates {  // where a row's states rest on the host
  void* master;    // fp32; with `low` the bf16 half that is the weight (split_chunk.h)
  uint16_t* low;   // null: the master is whole
  States states;
  void* slot;      // of the gradient, which an update leaves there
  void* out;       // of the new 16-bit weight; null where the master, or its half, is the weight
  int32_t pinned;  // 0: the driver reads it when a copy is asked for, not when the copy's turn has come
};

// Device memory that streamed states pass through: slots of one chunk, `arrays` (a master and its
// states) of `slot_params` floats each.
struct StagingMemory {
  float* base;
  int64_t slot_params;
  int32_t arrays;
  int32_t slots;
};

// Host memory for new places of states, which an update with guessed factors writes to.
struct ShadowMemory {
  char* base;      // aligned as a cache line
  int64_t bytes;
  int32_t arrays;  // that a row may have on the host, each as long as fp32: a master and its states
};

// Updates that began before their gradients' factors were known, since the engine was made.
struct GuessCounts {
  int64_t commits;    // with factors that were guessed
  int64_t missed;     // of those, with another factor than the guessed one
  int64_t params;
  int64_t redone;     // of params: updated again
  // the most host memory for new places of states, in them and in early updates
  int64_t shadow_bytes;
  int64_t sent;          // of params: new weights sent to the device before the factors were known
};

struct EarlyCounts {  // updates that began before their commit, since the engine was made
  int64_t commits;    // with such rows
  // of those, with some put back or updated again; not for later factors (GuessCounts)
  int64_t missed;
  int64_t params;
  int64_t redone;     // of params: put back or updated again
  int64_t host_params;    // of the last commit: in rows on the host,
  int64_t landed_params;  // of those, with gradients that were there by then
  int64_t waiting_params;  // of those, with factors that were not there,
  int64_t guessed_params;  // and of these, updated by likely ones meanwhile
};

// Times of the step before the last committed one, from its commit; 0 where there were none of the
// kind, or where not all its updates had ended. launching_us is of the last step.
struct FinishTimes {
  double cpu_us;         // the last update by the CPU
  double streamed_us;    // the last states to be streamed are on the device, or on their way
  // idle time over the number of workers, from the first CPU update to the last
  double cpu_paused_us;
  double cpu_begun_us;   // the first update by the CPU
  double streamed_held_us;  // before the last states: the lane waited for updates by the CPU
  // launching from the last wait() to the last commit(), without what held it up; 0 where the loop
  // waited before commit()
  double launching_us;
  int64_t ahead;         // gradients offloaded by then, before their rows' previous updates ended
  // parameters of updates put on the lane to the device together, as the step's rest
  int64_t at_once;
  int64_t promised;      // of these, new weights whose gradients had not come by then
};

struct DeviceStates {
  float* master;  // the weight itself for fp32 rows
  States states;
};

struct CommitItem {
  int32_t row;
  // 1: weight or gradient was touched outside the graphs; go by this commit's event
  int32_t at_end;
  const void* grad;   // rows placed on the device: their real gradient
  int32_t n_factors;  // multiplications logged on the gradient
  int32_t factors[kMaxFactors];
  UpdateScalars scalars;
};

struct TaskRecord {
  int32_t kind;  // a stage: 0 D2H, 1 CPU update, 2 device update, 3 H2D, 6 states in, 7 states out
  int32_t row;
  int32_t chunk;
  int32_t worker;
  int32_t workers;  // that share the updates meanwhile
  double begin_us;
  double end_us;
};

struct EngineOptions {
  int32_t workers;
  int32_t device_ordinal;  // -1: the model is on the CPU
  double timeout_s;
  void* ring;
  uint64_t ring_bytes;
  float* factor_slots;  // 2 * factor_capacity floats, used in turn
  int32_t factor_capacity;
  void* update_functions[kUpdateKernels];
  void* gather_function;
  const int32_t* worker_cores;  // one a worker; null: not pinned
  int32_t slots_unpinned;  // 1: who asks for a copy to a factor's slot waits for the device
  // of a lane's queue: each copy, launch, event, wait and word takes one; 0: without end
  int32_t queue_places;
};

}  // namespace hytrain_fx
