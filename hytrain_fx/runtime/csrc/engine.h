// The engine: what becomes of a gradient between the backward graph that makes it and the forward graph that reads the new weight.
//
//   IDLE --grad_offload--> GRAD --commit--> PENDING --wait--> IDLE
//                           |  ^               ^
//                 commit_early  put back       |                          (engine_early.cpp)
//                           v  |               |
//                           EARLY --commit-----+
//
// A PENDING row placed on the host goes, chunk by chunk, through three threads' hands:
//   lander   its D2H event has passed      -> landed
//   workers  landed, armed, factors known  -> updated     lowest unit first; factors may be guessed (engine_guess.cpp)
//   uploader updated, armed, released      -> issued      lowest unit first, a bounded number of bytes in flight
// The rest of a step is issued at once, what is yet to be updated behind flags that the updates raise (engine_flagged.cpp).
// A PENDING row placed on the device is one kernel on the update lane, behind its gradient and its last reader.
// A PENDING row that is streamed goes, chunk by chunk, through the uploader's: states in, kernel as above, states out.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "adamw_beside.h"
#include "device.h"
#include "locks.h"
#include "native_structs.h"
#include "ring.h"
#include "shared_limits.h"

namespace hytrain_fx {

constexpr int64_t kCopyBytes = 32 << 20;  // of gradients in one copy: few enough copies that no stream's queue fills up and blocks the launching thread

using EngineMutex = OrderedMutex<LockOrder::kEngine>;
using EngineLock = std::unique_lock<EngineMutex>;

// Byte offsets into untyped memory.
inline const char* offset(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
inline char* offset(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

inline void sleep_us(double mean_us) {  // delays that tests set
  if (mean_us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(mean_us));
}

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();

  void add_row(const RowSpec& spec);  // numbered in the order of the calls
  void set_unit(int row, int unit);
  void set_weight(int row, void* weight);
  // The bf16 `copy` takes the place of the row's fp32 weight: it is what updates write. Its gradients are fp32 where they rest on the device,
  // and of the dtype last set where they come to the slot, which is of 4 bytes an element. Factors multiply them in fp32.
  void use_copy(int row, void* copy);
  void set_gradient_dtype(int row, Dtype dtype);
  void place_on_host(int row, const HostStates& states);
  void place_on_device(int row, const DeviceStates& states);
  void set_staging(const StagingMemory& memory);
  void set_ring(void* memory, size_t bytes) { ring_.move_to(memory, bytes); }  // between steps: only grad_offload uses it besides
  void place_streamed(int row, const HostStates& states);  // no slot
  void send_weight(int row, bool on);  // streamed with masters in halves: whether the half that is the weight goes home in each step
  void set_shadow(const ShadowMemory& memory);             // once

  void grad_offload(const int32_t* rows, const void* const* grads, int n, void* stream);
  // Gradients that stay on the device, out of buffers that die behind this point of the compute stream: in one launch. `kept` aligned to 64.
  void keep_grads(void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream);
  void arm_cpu(const int32_t* rows, int n);
  void arm_gpu(const int32_t* rows, int n, void* stream);
  void arm_reload(const int32_t* rows, int n);
  void release(const int32_t* rows, int n, void* stream);
  // `factors[i]`: device address of a 0-dim float, or null where slot i already holds the value. `skip`: the one of them that, where it is not
  // zero, leaves the step out, or -1.
  void commit(const CommitItem* items, int n, const void* const* factors, int n_factors, int skip, void* stream);
  // A guess at the commit to come: rows on the host that have their gradients are updated ahead of it, each with these scalars and the factors of
  // its last commit. commit() confirms it or has the rows put back and updated anew; drain(), discard() and a new gradient put them back. Rows for
  // which it would not pay, or for which there is no shadow memory, wait for their commit.
  void commit_early(const CommitItem* items, int n);
  bool skipped();  // whether the last commit with a `skip` was left out; waits until that has come
  void wait(const int32_t* rows, int n, void* stream);
  void settle(const int32_t* rows, int n);  // as wait, and the host waits for the copies too
  void drain(const int32_t* rows, int n);   // as settle, and states are at home then
  // Begins to bring gradients back from their slots, to `dst` one after the other, each padded to 64 bytes; gives the number to wait by. `dst` is
  // the caller's until the compute stream has been made to wait, by fetched(), which is asked once.
  uint64_t fetch(const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream);
  void fetched(uint64_t fetch, void* stream);
  void discard(const int32_t* rows, int n);
  bool pending(int row);
  float* factor_slots();  // the half that the next commit reads; waits until the commit before the last has read it

  void set_delay(int stage, double mean_us);
  void fail_next_update(int row) { fail_row_ = row; }
  void fail_next_copy(int row) { fail_copy_row_ = row; }  // of its new weight to the device
  void fail_device_after(int operations) { device_->fail_after(operations); }
  void fail(const std::string& message);  // no call succeeds from now on
  void record(bool on);
  int take_records(TaskRecord* out, int capacity);
  GuessCounts guess_counts();
  EarlyCounts early_counts();
  FinishTimes finish_times();
  double cpu_update_us(int row);  // of the last finished update: workers' time over their number

 private:
  enum class Phase { IDLE, GRAD, EARLY, PENDING };
  enum class Place { NOWHERE, HOST, DEVICE, STREAMED };
  using Key = std::array<int, 3>;  // unit, row, chunk: the order in which work is due

  struct Shadow {  // of a granule: other memory for its states, which an update on a guess leaves where they were
    char* slot = nullptr;
    bool holds = false;  // the states are there, and not at home, as the last step left them
  };
  struct Chunk {
    int64_t begin, end;
    int granules, taken = 0, finished = 0;
    bool landed = false, queued = false;
    std::vector<Shadow> shadows;  // by granule
    int guessed = 0;             // so many of the first granules were taken with guessed factors
    int redo = 0, redo_end = 0;  // of them, granules to be taken again
    bool undo = false;           // the guess was wrong; they are taken again when the running ones are done
    bool put_back = false;       // with undo, and after it: they are put back, and the chunk is as though nobody had begun it
    EventPtr ahead;              // its new weight was sent before its factors were known
    uint64_t ahead_issue = 0;    // as Row::issue
    bool send_back = false;      // it was, and the step is left out: the old weight goes there again
    bool flagged = false;        // the copy of its new weight stands on the lane behind `flag`, for `raised`; it is yet to be updated
    uint32_t* flag = nullptr;    // null: the device has none
    uint32_t raised = 0;
  };
  struct Row {
    RowSpec spec{};
    bool copied = false;  // use_copy
    Dtype grad_dtype{};   // of the gradient in the slot
    Place place = Place::NOWHERE;
    HostStates host{};
    DeviceStates device{};
    Phase phase = Phase::IDLE;
    uint64_t generation = 0;
    bool sends_weight = false;
    bool armed_cpu = false, armed_reload = false, factors_known = true, guessing = false;
    bool skipped = false;         // on the host: what is in flight is left out
    bool bad_guess = false;       // a guessed update met a gradient that is not finite
    const float* skip = nullptr;  // streamed: as in DeviceUpdate
    std::array<float, kMaxFactors> guess{};
    bool early = false;           // its updates began before its commit
    uint64_t early_commit = 0;    // number of the commit that was guessed at
    int put_back = 0;             // chunks being put back
    int flagged = 0;              // chunks
    bool passed = false;          // PENDING, and wait() has let the launching thread go on: its next calls are of the next step
    bool next_gradient = false;   // passed, and the next gradient is on its way
    EventPtr landing, ready, released, weight;
    bool awaited = false;          // wait() has made a compute stream wait for `weight`: this one
    const void* awaited_on = nullptr;
    EventPtr open;                 // of ready and released that which was recorded last: from it on it may be updated
    uint64_t open_mark = 0;        // its number: events of the compute stream come in the order in which they are recorded
    EventPtr stored;               // streamed: the last copy of its states back to the host
    const void* grad = nullptr;    // streamed: what the kernels read
    int streamed = 0;              // streamed: chunks sent on their way
    int issued = 0;
    uint64_t issue = 0;  // number of the H2D copy behind `weight`: the lane is in order, so of several rows the latest will do
    AdamScalars scalars{};
    int n_factors = 0;
    std::array<int, kMaxFactors> factors{};        // by slot
    std::array<float, kMaxFactors> factor_values{};  // once known: later commits use the slots again
    int n_values = 0;    // of them
    std::array<float, kMaxFactors> likely{};  // the last values that came twice running: what is guessed
    uint32_t same = 0;   // whether a commit's factors were the likely ones: a bit each, the latest lowest
    int outcomes = 0;    // bits that count
    uint64_t commit = 0;
    double busy_us = 0, last_busy_us = 0;
    std::vector<Chunk> chunks;
  };
  struct Part {  // one chunk of a gradient on its way to its slot
    int row, chunk;
    uint64_t generation;
    const void* source;
    char* slot;
    int64_t bytes;
  };
  struct Landing {
    EventPtr begin, event;
    std::vector<Part> parts;       // none: the factors of a commit, and
    const float* factors = nullptr;  // where they are
    int n_factors = 0;
    uint64_t commit = 0;
    int skip = -1;
  };
  struct LaneRecord {
    int kind, row, chunk;  // of a copy of several chunks: the first
    EventPtr begin, end;
  };

  struct StagingSlot {
    std::array<float*, 4> at{};
    EventPtr stored;  // the slot is free after it
    uint64_t visit = 0;  // number of the last
  };

  static bool known_now(const CommitItem& item, const void* const* factors);
  static int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }
  static Dtype weight_dtype(const Row& row) { return static_cast<Dtype>(row.spec.dtype); }
  static int64_t weight_bytes(const Row& row) { return bytes_of(weight_dtype(row)); }
  static int64_t master_bytes(const Row& row) { return row.host.low ? 2 : 4; }  // on the host, of the whole or the half that is the weight
  static int64_t slot_grad_bytes(const Row& row) { return bytes_of(row.grad_dtype); }
  static Dtype device_grad_dtype(const Row& row) { return row.copied ? Dtype::kF32 : weight_dtype(row); }
  NonFinite nonfinite_of(int row) const { return {options_.nonfinite, row + 1}; }
  Row& at(int row);
  void begin_gradient(Row& row, int index, const void* grad, std::vector<Part>& parts);
  static void begin_chunks(Row& row);
  void copy_piece(const std::vector<Part>& parts, size_t first, size_t last, void* stream);
  void finish_landing(int row);
  Row& place(int row, Place place);
  static const void* new_weight(const Row& row);
  void check_committable(const CommitItem& item);
  void begin_update(Row& row, const CommitItem& item);
  bool have_ended() const;
  std::vector<std::vector<const CommitItem*>> launches(const std::vector<const CommitItem*>& items);
  void commit_on_device(const std::vector<const CommitItem*>& items, const EventPtr& end, const float* skip);
  void commit_streamed(const CommitItem& item, const EventPtr& end, const float* skip);
  void queue_if_ready(Row& row, int index, int chunk);
  void queue_all_ready(Row& row, int index);
  void finish_wait(Row& row, int index, EngineLock& lock);
  static void give_weight(Row& row, const EventPtr& end) {
    row.weight = end;
    row.awaited = false;
  }
  float* half_of(uint64_t commit) { return options_.factor_slots + (commit % 2) * options_.factor_capacity; }
  static void take_factors(Row& row, const float* slots, bool skipped);
  struct Task {  // what a worker does next
    int granule;
    bool guessed, again, restore;  // restore: and no more than that
    Shadow shadow;
    AdamScalars scalars;
  };
  bool take_task(const Key& key, Task& task);
  void finish_task(const Key& key);
  // Both: false for a gradient that is not finite: nothing is updated from the first block on where it is not. What was updated on a guess can be
  // put back all the same.
  bool run_task(Row& row, const Chunk& chunk, const Task& task);
  bool update_on_host(Row& row, int64_t begin, int64_t n, const Task& task);
  // engine_guess.cpp
  bool may_be_redone(const Row& row) const;
  static bool is_steady(const Row& row);
  bool may_guess(const Row& row, int n_factors) const;
  int64_t shadow_slot_bytes() const;
  char* take_shadow();
  void factors_came(const Landing& landing, EngineLock& lock);
  void await_wrongly_sent(const Landing& landing, bool skipped, EngineLock& lock);
  void settle_guess(Row& row, int index, bool at_commit);
  static int64_t guessed_params(const Chunk& chunk);
  void settle_shadows(Chunk& chunk, bool updated);
  void redo_guessed(const Key& key, Chunk& chunk);
  void offer_ahead(const Row& row, const Key& key);
  void offer_updated_ahead(const Row& row, int index);
  void leave_out(Row& row, int index);
  void chunk_left_out(Row& row);
  // engine_early.cpp
  static bool was_foreseen(const Row& row, const CommitItem& item);
  void chunk_was_put_back(const Key& key);
  void give_up_early(Row& row, int index);
  void withdraw(const int32_t* rows, int n, EngineLock& lock);
  void count_early(const Row& row, int64_t params, bool again);
  void count_landed(const Row& row);
  void count_waiting(const Row& row);
  struct InFlight {  // on the lane to the device, in its order
    EventPtr end;
    int64_t bytes;
    EventPtr begin;  // while recording
  };
  // A new weight; one whose factors are not known; one that is yet to be updated, behind its flag; states on a visit.
  enum class Load { WEIGHT, AHEAD, FLAGGED, STATES };
  struct Upload {
    int row = -1, chunk = 0;
    Load load = Load::WEIGHT;
    StagingSlot* slot = nullptr;  // of states
  };
  // engine_flagged.cpp
  bool rest_is_near() const;
  bool may_send_rest() const;
  bool streams_long() const;
  static bool awaits_copies(const Row& row);
  static bool may_flag_row(const Row& row);
  std::set<Key> flag_rest();
  std::vector<Upload> take_rest();
  bool send_rest(EngineLock& lock);
  struct Barrier {  // a flag that the lane waits for
    EventPtr before;  // done: the lane has come so far; null: at once
    const uint32_t* flag;
    uint32_t raised;
  };
  static bool stands(const std::vector<Barrier>& barriers, size_t& next);
  void follow(Event& last, const std::vector<Barrier>& barriers, uint64_t commit, EngineLock& lock);
  void end_flagged_chunk(Row& row, Chunk& chunk);
  void end_flagged(EngineLock& lock);
  void raise_all_flags();
  static void make_current(Row& row);
  // engine_shadow.cpp
  static HostArrays home_of(const Row& row, int64_t begin);
  static HostArrays arrays_in(const Row& row, char* slot);
  static void restore_master(const Row& row, int64_t begin, int64_t n, const char* kept);
  static bool is_home(const Row& row);
  void bring_home(const int32_t* rows, int n, EngineLock& lock);
  void carry_all_home(EngineLock& lock);
  void carry_home(EngineLock& lock);  // one piece
  void await_last_step(EngineLock& lock);
  const Key* next_of(const std::set<Key>& keys) const;
  void ask_events(EngineLock& lock) const;
  Upload next_upload();
  InFlight issue_reload(const Upload& upload, EngineLock& lock);
  InFlight issue_ahead(const Upload& upload, EngineLock& lock);
  InFlight copy_weight(const Row& row, const Upload& upload, bool recording);
  void note_copy(const Upload& upload, const InFlight& copy);
  void weight_was_sent(Row& row, const EventPtr& end, uint64_t issue);
  InFlight stream_chunk(const Upload& upload, EngineLock& lock);
  int next_streamed(bool& ready);
  StagingSlot* free_staging_slot();
  StagingSlot* next_staging_slot();
  void start_threads();
  void stop_threads();
  void land();
  void work(int index);
  void upload();
  void guarded(const char* who, void (Engine::*loop)());
  void note_failure(const std::string& message);  // with the lock held
  void throw_if_failed();
  double launched_since(double now_us) const;
  static std::string nonfinite_message(int row) {
    return "non-finite gradient: row " + std::to_string(row) + " has NaN or infinite values in its gradient";
  }
  void note(int kind, int row, int chunk, int worker, double begin_us, double end_us);
  std::vector<TaskRecord> take_done_lanes();
  void count_busy(double begin_us, double end_us);
  void note_update(int row, int chunk, int worker, double begin_us, double end_us);

  EngineOptions options_;
  std::unique_ptr<Device> device_;
  std::vector<int32_t> worker_cores_;  // empty: not pinned
  Ring ring_;
  EngineMutex mutex_;  // guards everything below but the contents of slabs
  Condition landed_cv_, work_cv_, upload_cv_, issued_cv_;
  std::deque<Row> rows_;  // not moved when one is added: threads read a row that they work on without the lock
  std::deque<Landing> landings_;
  std::set<Key> ready_, updated_, ahead_, streaming_;  // ahead_: updated on a guess; streaming_: rows, chunk 0
  std::vector<StagingSlot> staging_;
  int waiting_ = 0;       // threads in wait()
  int flagged_rows_ = 0;  // with chunks whose copies stand behind flags
  int64_t streaming_params_ = 0, streamed_params_ = 0;  // of the last commit: streamed ones in all, and those that were sent on their way
  bool following_ = false;  // the rest of a step, with streamed updates in it, is on the lane
  uint64_t commits_ = 0, issues_ = 0, visits_ = 0, marks_ = 0, fetch_count_ = 0;
  std::map<uint64_t, EventPtr> fetches_;  // not waited for yet, by number
  EventPtr last_fetch_;
  std::vector<char*> shadows_;  // free slots
  std::vector<std::array<int, 3>> homeward_;  // row, chunk, granule: states to be carried home
  int homeward_left_ = 0;                     // and those that are being carried
  size_t shadow_slots_ = 0;
  int32_t shadow_arrays_ = 0;  // in each
  bool can_guess_ = false;
  std::array<bool, 2> factors_on_way_{};       // by half of the slots
  bool skip_on_way_ = false, skipped_ = false;  // of the last commit with a `skip`
  GuessCounts guesses_{};
  EarlyCounts early_{};
  uint64_t last_early_ = ~0ull, last_missed_ = ~0ull;  // numbers of the last commits that count in early_.commits and .missed
  bool stop_ = false;
  std::atomic<bool> recording_{false};
  std::string failure_;
  std::vector<TaskRecord> records_;
  std::vector<int> running_;  // by worker: its last record, -1 for none
  double commit_us_ = 0;      // of the last commit
  double passed_us_ = 0, launched_us_ = 0;  // when the last wait() for an update returned, and when it or the last release() after it was called
  double launching_us_ = 0;                 // from the one to the other, without what the launching thread was held up for
  double last_launching_us_ = 0;            // FinishTimes::launching_us of the last commit
  FinishTimes finish_{}, last_finish_{};  // of the last commit, as far as it has come; of the one before
  double first_update_us_ = 0, workers_busy_us_ = 0;  // since the last commit: begin of the first update by the CPU, workers' time over their number
  std::vector<LaneRecord> lane_records_;
  std::atomic<double> worker_delay_us_{0}, lander_delay_us_{0}, reload_delay_us_{0};
  std::atomic<int> fail_row_{-1}, fail_copy_row_{-1};
  std::vector<std::thread> threads_;
};

}  // namespace hytrain_fx
