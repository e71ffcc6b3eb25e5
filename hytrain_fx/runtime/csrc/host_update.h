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

void run_task(const Row& row, const Chunk& chunk, const Task& task);  // without the lock

}  // namespace hytrain_fx
