// One granule's update by the CPU, where its states are.
#pragma once

#include "row.h"

namespace hytrain_fx {

struct Task {  // what a worker does next
  int granule;
  bool guessed;  // the scalars have guessed factors
  bool again;    // the master is put back first
  bool restore;  // and no more than that
  Shadow shadow;
  UpdateScalars scalars;
};

// Without the lock. False for a gradient that is not finite: nothing is updated from the first
// block on where it is not. What was updated on a guess can be put back all the same.
bool run_task(const Row& row, const Chunk& chunk, const Task& task);

}  // namespace hytrain_fx
