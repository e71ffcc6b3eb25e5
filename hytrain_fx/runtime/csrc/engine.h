// The engine: what happens to a gradient between the backward graph that makes it and the forward
// graph that reads the new weight.
//
// A row (row.h) goes from IDLE to GRAD with its gradient, to PENDING with its commit, and back with
// the wait for its new weight. A PENDING row placed on the host goes, chunk by chunk (chunk.h),
// through three threads' hands:
//   lander   its D2H event has passed      -> landed
//   workers  landed, armed, factors known  -> updated  lowest unit first; factors may be guessed
//   uploader updated, armed, released      -> sent     lowest unit first, few bytes in flight
// Once somebody waits, the rest of a step is sent at once: what is not updated yet goes after flags
// that the updates raise, and workers keep to the lane's order. A PENDING row placed on the device
// is one kernel on the update lane, after its gradient and its last reader. A streamed row goes,
// chunk by chunk, through the uploader's hands: states in, kernel as above, states out.
//
// The parts:
//   what is called   grad_offload.h, early_updates.h, commit.h, waits.h, grad_fetches.h
//   threads          lander.h, workers.h (updates.h, host_update.h, homeward.h), uploader.h
//   ways to update   guesses.h, flagged_tail.h, device_updates.h, streamed_visits.h
//   shared           engine_state.h: rows, queues, the mutex; step_clock.h, records.h
//   memory           shadow_arena.h, staging_area.h, factor_slots.h, ring.h
#pragma once

#include <thread>
#include <vector>

#include "commit.h"
#include "grad_fetches.h"
#include "grad_offload.h"
#include "uploader.h"
#include "waits.h"
#include "workers.h"

namespace hytrain_fx {

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();

  // The table of rows.
  void add_row(const RowSpec& spec);  // numbered in the order of the calls
  void set_unit(int row, int unit);
  void set_weight(int row, void* weight);
  // The bf16 `copy` replaces the row's fp32 weight: updates write it. Gradients are fp32 where they
  // rest on the device. In the slot, which has 4 bytes an element, they have the dtype last set.
  // Factors multiply them in fp32.
  void use_copy(int row, void* copy);
  void set_gradient_dtype(int row, Dtype dtype);
  void place_on_host(int row, const HostStates& states);
  void place_on_device(int row, const DeviceStates& states);
  void place_streamed(int row, const HostStates& states);  // no slot
  // streamed with masters in halves: does the weight's half go home in each step
  void send_weight(int row, bool on);
  // Memory.
  void set_staging(const StagingMemory& memory) { staging_.set(memory, state_.mutex); }
  void set_ring(void* memory, size_t bytes) { offload_.move_ring(memory, bytes); }
  void set_shadow(const ShadowMemory& memory);  // once

  // The nodes of the backward graph.
  void grad_offload(const int32_t* rows, const void* const* grads, int n, void* stream);
  // Gradients that stay on the device, out of buffers that die after this point of the compute
  // stream: copied in one launch. `kept` is aligned to 64.
  void keep_grads(void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream) {
    offload_.keep(kept, grads, bytes, n, stream);
  }
  void arm_cpu(const int32_t* rows, int n);
  void arm_gpu(const int32_t* rows, int n, void* stream);
  void arm_reload(const int32_t* rows, int n);
  void release(const int32_t* rows, int n, void* stream);

  // step(). `factors[i]`: device address of a 0-dim float, or null where slot i already holds the
  // value. `skip`: the one of them that leaves the step out where it is not zero, or -1.
  void commit(const CommitItem* items, int n, const void* const* factors, int n_factors, int skip, void* stream) {
    commit_.run(items, n, factors, n_factors, skip, stream);
  }
  // A guess at the next commit. Rows on the host that have their gradients are updated ahead of it,
  // each with these scalars and the factors of its last commit. commit() confirms the guess, or has
  // the rows put back and updated again. drain(), discard() and a new gradient put them back. Rows
  // for which it would not pay, or for which there is no shadow memory, wait for their commit.
  // Until then so many workers update, at least one.
  void commit_early(const int32_t* rows, int n, const UpdateScalars& scalars, int workers);
  // Whether the last commit with a `skip` was left out; waits until that is known.
  bool skipped() { return slots_.await_skipped(); }
  bool knows_skipped() { return slots_.knows_skipped(); }  // without a wait
  // The half that the next commit reads; waits until the commit before the last has read it.
  float* factor_slots() { return slots_.await_next(); }

  // Wait nodes, eager reads, close.
  void wait(const int32_t* rows, int n, void* stream) { waits_.wait(rows, n, stream); }
  // like wait, and the host waits for the copies too
  void settle(const int32_t* rows, int n) { waits_.settle(rows, n); }
  // like settle, and then states are at home
  void drain(const int32_t* rows, int n) { waits_.drain(rows, n); }
  // Begins to bring gradients back from their slots, to `dst` one after the other, each padded to
  // 64 bytes. Gives the number to wait by. `dst` belongs to the caller until the compute stream has
  // been made to wait, by fetched(), which is called once.
  uint64_t fetch(const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream) {
    return fetches_.begin(rows, n, dst, dst_bytes, stream);
  }
  void fetched(uint64_t fetch, void* stream) { fetches_.await(fetch, stream); }
  // Returns when the gradients that were sent to the slots of these rows are there, and none is
  // being read there: the host may add to them, until a commit.
  void landed(const int32_t* rows, int n) {
    for (int i = 0; i < n; ++i) finish_landing(rows[i]);
  }
  void discard(const int32_t* rows, int n);
  bool pending(int row);
  // Whether wait() would return at once.
  bool issued(const int32_t* rows, int n);

  // Measurement, and what tests provoke.
  void record(bool on);
  int take_records(TaskRecord* out, int capacity) { return state_.records.take(out, capacity, *state_.device, state_.mutex); }
  GuessCounts guess_counts();
  EarlyCounts early_counts();
  FinishTimes finish_times();
  double cpu_update_us(int row);  // of the last finished update: workers' time over their number
  void set_delay(int stage, double mean_us);
  void fail_next_update(int row) { state_.provoked.update_fails_in = row; }
  // of its new weight to the device
  void fail_next_copy(int row) { state_.provoked.copy_fails_in = row; }
  void fail_device_after(int operations) { state_.device->fail_after(operations); }
  void fail(const std::string& message) { state_.fail(message); }  // no call succeeds from now on

 private:
  template <class Run>
  void start(const std::string& name, const char* what, Run run);
  void stop_threads();
  void finish_landing(int row);
  Row& place(int row, Place place);

  EngineState state_;
  Updates updates_{state_};
  FactorSlots slots_{state_};
  EarlyTally tally_;
  Guesses guesses_{state_, updates_, slots_, tally_};
  EarlyUpdates early_{state_, updates_, guesses_, tally_};
  Homeward homeward_{state_};
  FlaggedTail tail_{state_};
  StagingArea staging_;
  StreamedVisits visits_{state_, staging_};
  DeviceUpdates on_device_{state_};
  Lander lander_{state_, guesses_};
  Workers workers_{state_, updates_, homeward_};
  Uploader uploader_{state_, updates_, guesses_, tail_, staging_, visits_};
  GradOffload offload_{state_, lander_};
  GradFetches fetches_{state_, tail_};
  Waits waits_{state_, early_, tail_, homeward_};
  Commit commit_{state_, {updates_, slots_, guesses_, early_, tally_, homeward_, tail_, lander_, visits_, on_device_}};
  std::vector<std::thread> threads_;
};

}  // namespace hytrain_fx
