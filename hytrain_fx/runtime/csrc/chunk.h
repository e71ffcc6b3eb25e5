// A chunk: a part of a row's parameters that is copied as a whole, and updated by workers one
// granule after the other.
//
// In a row on the host it is in one state at a time:
//
//   AWAITED --> LANDED --> QUEUED ------------------> UPDATED --> SENT --> AWAITED
//     on the way to the device after a flag (flagged_tail.h):
//                          QUEUED --> FLAGGED -------------------> SENT
//   AWAITED --> PROMISED -----------> FLAGGED
//     updated with likely factors (guesses.h), which were right, or wrong:
//                          QUEUED --> GUESSED ------> UPDATED or SENT
//                                     GUESSED --> TAKEN_BACK --> QUEUED
//     updated ahead of a commit that did not come so (early_updates.h):
//                                     GUESSED --> WITHDRAWN --> RESTORING --> LANDED
//     the step is left out: LANDED or QUEUED --> LEFT_OUT --> AWAITED
//     no shadow is free for a guess (shadow_arena.h): QUEUED --> LANDED
//
// kNextStates has all transitions: a guess may be wrong before all of the chunk is updated. In a
// build with HYTRAIN_FX_CHECK_STATES (scripts/race_check) any other one ends the program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device.h"
#include "shared_limits.h"

namespace hytrain_fx {

enum class ChunkState : uint8_t {
  AWAITED,     // its gradient has not come to the slot
  // the gradient is there, and no worker may take it: not armed, not committed, or without a shadow
  // for a guess
  LANDED,
  QUEUED,      // workers take its granules, or are at the last of them
  // like QUEUED, and the copy of its new weight is on the lane and waits for the chunk's flag
  FLAGGED,
  PROMISED,    // like FLAGGED, and its gradient has not come to the slot
  GUESSED,     // updated with guessed factors, and the true ones have not come
  // the guess was wrong: what is updated is taken again once the running granules are done
  TAKEN_BACK,
  // updated ahead of a commit that did not come so: it is put back once the running granules are
  // done
  WITHDRAWN,
  RESTORING,   // it is being put back
  UPDATED,     // the new weight waits for its copy
  SENT,        // the new weight is on its way
  LEFT_OUT,    // the step does not count
};

constexpr int kChunkStates = 12;
constexpr const char* kChunkStateNames[kChunkStates] = {"AWAITED",    "LANDED",    "QUEUED",    "FLAGGED", "PROMISED", "GUESSED",
                                                        "TAKEN_BACK", "WITHDRAWN", "RESTORING", "UPDATED", "SENT",     "LEFT_OUT"};

inline const char* name_of(ChunkState state) { return kChunkStateNames[static_cast<int>(state)]; }

template <class... States>
constexpr uint32_t mask(States... of) {
  return ((1u << static_cast<unsigned>(of)) | ...);
}

// By state: the states that may come after it.
constexpr uint32_t kNextStates[kChunkStates] = {
    /* AWAITED    */ mask(ChunkState::AWAITED, ChunkState::LANDED, ChunkState::PROMISED),
    /* LANDED     */ mask(ChunkState::AWAITED, ChunkState::QUEUED, ChunkState::TAKEN_BACK, ChunkState::WITHDRAWN,
                          ChunkState::LEFT_OUT),
    /* QUEUED     */ mask(ChunkState::LANDED, ChunkState::FLAGGED, ChunkState::GUESSED, ChunkState::TAKEN_BACK, ChunkState::WITHDRAWN,
                          ChunkState::UPDATED, ChunkState::LEFT_OUT),
    /* FLAGGED    */ mask(ChunkState::SENT),
    /* PROMISED   */ mask(ChunkState::FLAGGED),
    /* GUESSED    */ mask(ChunkState::TAKEN_BACK, ChunkState::WITHDRAWN, ChunkState::UPDATED, ChunkState::SENT),
    /* TAKEN_BACK */ mask(ChunkState::QUEUED),
    /* WITHDRAWN  */ mask(ChunkState::RESTORING),
    /* RESTORING  */ mask(ChunkState::LANDED),
    /* UPDATED    */ mask(ChunkState::SENT),
    /* SENT       */ mask(ChunkState::AWAITED),
    /* LEFT_OUT   */ mask(ChunkState::AWAITED),
};

// A granule's other memory for its states (shadow_arena.h). An update on a guess leaves them where
// they were.
struct Shadow {
  char* slot = nullptr;
  bool holds = false;  // the states are there, and not at home, after the last step
};

class Chunk {
 public:
  Chunk(int64_t begin, int64_t end, uint32_t* flag)
      : begin(begin), end(end), flag(flag), shadows((end - begin + kGranule - 1) / kGranule) {}

  ChunkState state() const { return state_; }
  bool is(ChunkState state) const { return state_ == state; }
  void set_state(ChunkState next) {
#ifdef HYTRAIN_FX_CHECK_STATES
    if (!(kNextStates[static_cast<int>(state_)] & mask(next))) {
      std::fprintf(stderr, "chunk: %s after %s; the transitions are in csrc/chunk.h\n", name_of(next), name_of(state_));
      std::abort();
    }
#endif
    state_ = next;
  }

  // A new gradient is on its way.
  void begin_gradient() {
    set_state(ChunkState::AWAITED);
    begin_granules();
  }
  void begin_granules() { taken = finished = redo = redo_end = 0; }

  int64_t params() const { return end - begin; }
  int granules() const { return static_cast<int>(shadows.size()); }
  int64_t granule_begin(int granule) const { return begin + granule * kGranule; }
  int64_t granule_params(int granule) const { return std::min(kGranule, end - granule_begin(granule)); }
  bool is_updated() const { return finished == granules(); }
  bool awaits_gradient() const { return is(ChunkState::AWAITED) || is(ChunkState::PROMISED); }
  bool awaits_flag() const { return is(ChunkState::FLAGGED) || is(ChunkState::PROMISED); }
  bool is_withdrawn() const { return is(ChunkState::WITHDRAWN) || is(ChunkState::RESTORING); }
  int64_t guessed_params() const { return std::min<int64_t>(guessed * kGranule, params()); }

  int64_t begin, end;
  uint32_t* flag;         // null: the device has none
  int place = 0;          // on the lane, while it is FLAGGED or PROMISED; else 0
  uint32_t raised = 0;    // what the copy of a FLAGGED or PROMISED chunk waits for
  int taken = 0, finished = 0;  // granules
  int guessed = 0;              // so many of the first were taken with guessed factors
  int redo = 0, redo_end = 0;   // of them, those to be taken again
  std::vector<Shadow> shadows;  // by granule
  EventPtr ahead;               // its new weight was sent before its factors were known
  uint64_t ahead_issue = 0;     // like Row::issue
  // it was sent ahead, and the step is left out: send the old weight again
  bool send_back = false;

 private:
  ChunkState state_ = ChunkState::AWAITED;
};

}  // namespace hytrain_fx
