// States that an update on a guess has left in shadow slots (shadow_arena.h), on their way home.
#pragma once

#include <vector>

#include "engine_state.h"

namespace hytrain_fx {

class Homeward {
 public:
  explicit Homeward(EngineState& state) : state_(state) {}

  bool is_empty() const { return pieces_.empty(); }
  bool are_all_home() const { return left_ == 0; }
  // One piece. The lock is let go meanwhile.
  void carry(EngineLock& lock);
  // All pieces, together with the workers; returns when none is left.
  void carry_all(EngineLock& lock);
  // The states of these rows, where no update may change them. Also when the engine has failed, and
  // has no workers any more.
  void bring(const int32_t* rows, int n, EngineLock& lock);

 private:
  struct Piece {
    int row, chunk, granule;
  };

  EngineState& state_;
  std::vector<Piece> pieces_;
  int left_ = 0;  // and those that are being carried
};

}  // namespace hytrain_fx
