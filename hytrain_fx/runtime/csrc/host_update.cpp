#include "host_update.h"

#include "shadow_arena.h"

namespace hytrain_fx {
namespace {

void update_granule(const Row& row, int64_t begin, int64_t n, const Task& task) {
  char* const slot = offset(row.host.slot, begin * row.slot_grad_bytes());
  char* const master = offset(row.host.master, begin * row.master_bytes());
  char* const kept = task.guessed ? task.shadow.slot : nullptr;
  const HostArrays home = row.home(begin);
  if (task.shadow.slot) {
    const HostArrays beside = arrays_in(home, task.shadow.slot);
    const bool holds = task.shadow.holds;
    update_beside(slot, row.grad_dtype, master, kept, holds ? beside : home, holds ? home : beside, n, task.scalars);
  } else if (row.host.low) {
    update_split_chunk(slot, row.grad_dtype, reinterpret_cast<uint16_t*>(master), home.low, home.states, n, task.scalars);
  } else {
    void* const out = row.weight_bytes() == 2 ? offset(row.host.out, begin * 2) : nullptr;
    update_chunk(slot, row.grad_dtype, reinterpret_cast<float*>(master), home.states, out, row.weight_dtype(), n, task.scalars);
  }
}

}  // namespace

void run_task(const Row& row, const Chunk& chunk, const Task& task) {
  const int64_t begin = chunk.granule_begin(task.granule), n = chunk.granule_params(task.granule);
  if (task.again) row.restore_master(begin, n, task.shadow.slot);
  if (!task.restore) update_granule(row, begin, n, task);
}

}  // namespace hytrain_fx
