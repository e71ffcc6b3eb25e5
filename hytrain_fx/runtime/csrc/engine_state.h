// What the parts of the engine share: the table of rows, the queues between its threads, and
// whether it has failed. One mutex guards it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "device.h"
#include "locks.h"
#include "native_structs.h"
#include "records.h"
#include "row.h"
#include "shadow_arena.h"
#include "step_clock.h"

namespace hytrain_fx {

// What tests provoke.
struct Provoked {
  std::atomic<double> worker_delay_us{0}, lander_delay_us{0}, uploader_delay_us{0};
  std::atomic<int> update_fails_in{-1}, copy_fails_in{-1};  // rows
};

inline void sleep_us(double mean_us) {  // delays that tests set
  if (mean_us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(mean_us));
}

// Of the last backward that was committed: with its end, rows may be updated that no node has released
// before. Gradients that stay on the device may be made long after the last one has landed.
struct BackwardEnd {
  uint64_t mark = 0;         // of the compute stream's event there
  bool has_come = true;
  double landed_us = 0;      // when the last gradient before it had; 0: none
  uint64_t landed_mark = 0;  // of the compute stream's last event before that gradient
  double rest_us = 0;        // how much later it came, when it last did
  double after_us = 0;       // the shorter of the last two: a pause of the loop before step() is no backward
};

struct EngineState {
  explicit EngineState(const EngineOptions& options);

  // A row of the table; an error where it has no such row.
  Row& row(int index);
  Row& row(const Key& key) { return rows[key.row]; }
  Chunk& chunk(const Key& key) { return rows[key.row].chunks[key.chunk]; }

  // Workers get the row's chunks, or this one, where all that they wait for is there.
  void queue_ready(Row& row);
  void queue_ready(Row& row, int chunk);

  void fail(const std::string& message);  // no call succeeds from now on
  void note_failure(const std::string& message);  // like fail(), with the lock held
  bool has_failed() const { return !failure.empty(); }
  void throw_if_failed();
  // So that no stream waits for ever. After this the lane carries old weights, or parts of new
  // ones.
  void raise_all_flags();
  void notify_all();
  // All chunks of the row's new weight are on their way, or left out. A step has hundreds of rows: a
  // launching thread that waits for one is not woken for the others.
  void notify_issued(const Row& row) {
    if (row.awaited > 0) issued_cv.notify_all();
  }

  // The streamed row that may be updated last, of those with chunks to be sent; null: there is none.
  const Row* opens_last() const;

  // Waits until `done`. If that is not in time, the error names the wait: "WHAT after 20 s".
  template <class Done>
  void await(EngineLock& lock, const char* what, Done done) {
    if (issued_cv.wait_for(lock, std::chrono::duration<double>(options.timeout_s), done)) return;
    throw std::runtime_error(std::string(what) + " after " + std::to_string(options.timeout_s) + " s");
  }

  EngineOptions options;
  std::unique_ptr<Device> device;
  Provoked provoked;

  EngineMutex mutex;  // guards everything below, except the contents of slabs
  Condition landed_cv, work_cv, upload_cv, issued_cv;
  Rows rows;
  std::set<Key> ready;    // workers take their granules
  std::set<Key> updated;  // the uploader sends their new weights
  std::set<Key> ahead;    // like `updated`, by guessed factors
  std::set<Key> streaming;  // streamed rows of the last commit with chunks to be sent, by chunk 0
  int waiting = 0;        // threads in wait()
  int early_workers = 1;  // that update while `goes_ahead`
  bool goes_ahead = false;  // rows of the backward that runs are updated ahead of their commit
  int flagged_rows = 0;   // with FLAGGED or PROMISED chunks
  uint64_t commits = 0;
  uint64_t issues = 0;    // copies of new weights
  uint64_t marks = 0;     // events of the compute stream
  uint64_t landings = 0;  // of gradients, that were begun
  BackwardEnd backward_end;
  StepClock clock;
  Records records;
  ShadowArena shadows;
  std::string failure;
  bool stop = false;
};

}  // namespace hytrain_fx
