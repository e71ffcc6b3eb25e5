// A row: one parameter of the model, in its chunks.
//
//   IDLE --grad_offload--> GRAD --commit--> PENDING --wait--> IDLE
//                           |  ^               ^
//                 commit_early  put back       |                          (early_updates.h)
//                           v  |               |
//                           EARLY --commit-----+
//
// A row whose wait() has passed while chunks of it stand after flags is PASSED until the last of
// them is updated, and NEXT_GRAD from its next gradient on (flagged_tail.h).
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "update_beside.h"
#include "chunk.h"
#include "guess.h"
#include "native_structs.h"

namespace hytrain_fx {

// Byte offsets into untyped memory.
inline const char* offset(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
inline char* offset(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

enum class Place : uint8_t { NOWHERE, HOST, DEVICE, STREAMED };

enum class Phase : uint8_t {
  IDLE,
  GRAD,       // on the host: a gradient is in the slot, or on its way
  EARLY,      // on the host: its updates have begun before its commit
  PENDING,    // committed
  // committed, and wait() has let the launching thread go on: its next calls are of the next step
  PASSED,
  NEXT_GRAD,  // like PASSED, and the next gradient is on its way
};

enum class Factors : uint8_t {  // of the last commit
  KNOWN,
  AWAITED,  // they are on their way, and the updates wait for them
  GUESSED,  // they are on their way, and the updates do not
  SKIPPED,  // they are known, and the step is left out
};

// Nodes of the backward graph that have run: a bit each.
enum class Arm : uint8_t { CPU = 1, RELOAD = 2 };

// The order in which work is due: what stands on the lane behind flags in the lane's order, what
// the lane has yet to choose from by units.
struct Key {
  int unit, row, chunk, place = 0;
  friend bool operator<(const Key& a, const Key& b) {
    if (a.place != b.place) return a.place < b.place;
    if (a.unit != b.unit) return a.unit < b.unit;
    return a.row != b.row ? a.row < b.row : a.chunk < b.chunk;
  }
};

struct StreamedRow {  // what a row has that is streamed
  const void* grad = nullptr;   // what the kernels read
  const float* skip = nullptr;  // like in DeviceUpdate
  EventPtr stored;              // the last copy of its states back to the host
  uint64_t visit = 0;           // the number of the visit that it ended
  int chunks = 0;               // sent on their way
  bool sends_weight = false;    // with masters in halves: the half that is the weight goes home too
};

class Row {
 public:
  Row(const RowSpec& spec, int index, uint32_t* flags);

  int size() const { return static_cast<int>(chunks.size()); }
  Key key(int chunk) const { return {spec.unit, index, chunk, chunks[chunk].place}; }
  std::string name() const { return "row " + std::to_string(index); }

  bool has_copy() const { return parameter_dtype == Dtype::kF32 && weight_dtype() != Dtype::kF32; }
  Dtype weight_dtype() const { return static_cast<Dtype>(spec.dtype); }
  int64_t weight_bytes() const { return bytes_of(weight_dtype()); }
  // on the host: whole, or the weight's half
  int64_t master_bytes() const { return host.low ? 2 : 4; }
  int64_t streamed_bytes() const;  // of a master, where it is not half in the weight, and its states; an element's
  int64_t slot_grad_bytes() const { return bytes_of(grad_dtype); }
  Dtype device_grad_dtype() const { return has_copy() ? Dtype::kF32 : weight_dtype(); }

  bool on_host() const { return place == Place::HOST; }
  bool has_passed() const { return phase == Phase::PASSED || phase == Phase::NEXT_GRAD; }
  bool is_committed() const { return phase == Phase::PENDING || has_passed(); }
  bool is_armed(Arm arm) const { return (armed & static_cast<uint8_t>(arm)) != 0; }
  void arm(Arm arm) { armed |= static_cast<uint8_t>(arm); }
  bool are_factors_known() const { return factors_are == Factors::KNOWN || factors_are == Factors::SKIPPED; }
  bool is_guessing() const { return factors_are == Factors::GUESSED; }
  bool is_skipped() const { return factors_are == Factors::SKIPPED; }
  bool is_issued() const { return issued == size(); }
  bool is_early() const { return early_commit.has_value(); }
  bool awaits_factors_of(uint64_t number) const { return phase == Phase::PENDING && !are_factors_known() && commit == number; }
  bool may_be_queued() const;
  // of new weights that the CPU updates
  bool awaits_copies() const { return phase == Phase::PENDING && on_host() && !is_issued(); }
  // `foreseen`: also where its gradient is on its way, if the last one tells when it will be there
  bool may_be_flagged(bool foreseen) const;
  bool was_foreseen(const CommitItem& item) const;
  bool is_home() const;  // no state is in a shadow
  bool has_states_for(const UpdateScalars& scalars) const;

  void begin_chunks();
  void begin_update(const CommitItem& item, uint64_t number);
  void take_factors(const float* slots, bool skipped);
  void end_passed();  // the step is over for a row that wait() has passed
  void open_at(const EventPtr& event, uint64_t mark);
  void give_weight(const EventPtr& end);
  const void* new_weight() const;  // where an update by the CPU leaves it
  // of an element that goes to the device then: none where the weight rests on the host
  int64_t copied_bytes() const { return spec.weight == new_weight() ? 0 : weight_bytes(); }
  HostArrays home(int64_t begin) const;
  void restore_master(int64_t begin, int64_t n, const char* kept) const;

  RowSpec spec;
  int index;
  Dtype parameter_dtype;  // the weight's, before it was given a copy
  Dtype grad_dtype;       // of the gradient in the slot
  Place place = Place::NOWHERE;
  HostStates host{};
  DeviceStates device{};

  Phase phase = Phase::IDLE;
  Factors factors_are = Factors::KNOWN;
  uint8_t armed = 0;
  uint64_t generation = 0;  // of its gradient
  std::vector<Chunk> chunks;

  uint64_t commit = 0;
  UpdateScalars scalars{};
  int n_factors = 0;
  std::array<int, kMaxFactors> factors{};  // by slot
  Guess guess;
  std::optional<uint64_t> early_commit;  // number of the commit that its updates began before
  int withdrawn = 0;                     // chunks being put back
  int flagged = 0;                       // chunks

  EventPtr landing, ready, released;
  uint64_t landing_number = 0;  // landings come in this order
  uint64_t landing_mark = 0;    // of the compute stream's last event before the gradient
  double landed_us = 0;         // when the last gradient that came was whole
  uint64_t promised = 0;        // generation of the gradient that PROMISED chunks await
  // the one of ready and released that was recorded last: from it on the row may be updated
  EventPtr open;
  uint64_t open_mark = 0;  // its number: the compute stream's events come in the order of recording
  EventPtr weight;         // the new weight is there
  // the compute stream that wait() has made wait for `weight`
  std::optional<const void*> awaited_on;
  int issued = 0;
  int awaited = 0;  // threads that wait() holds up until it is issued
  // number of the H2D copy of `weight`: the lane is in order, so the latest counts
  uint64_t issue = 0;

  StreamedRow streamed;
  double busy_us = 0, last_busy_us = 0;
};

// A deque does not move rows when one is added: threads read the row they work on without the lock.
using Rows = std::deque<Row>;

}  // namespace hytrain_fx
