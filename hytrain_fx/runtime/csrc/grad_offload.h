// Gradients out of the backward graph's buffers: to their slots on the host, through the ring, or
// to other memory of the device.
#pragma once

#include "lander.h"
#include "ring.h"

namespace hytrain_fx {

// Slots in a slab and gradients in the ring stand this far apart. runtime/states/slabs.py has the
// same padding.
constexpr int64_t padded(int64_t bytes) { return (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes; }

class GradOffload {
 public:
  GradOffload(EngineState& state, Lander& lander)
      : state_(state), lander_(lander), ring_(state.options.ring, state.options.ring_bytes) {}

  // Between steps: nothing else uses the ring.
  void move_ring(void* memory, size_t bytes) { ring_.move_to(memory, bytes); }
  // With the lock held: notes the rows' gradients as on their way. Returns parts for copy().
  std::vector<Part> begin(const int32_t* rows, const void* const* grads, int n);
  // Without the lock: on a CPU these calls are the copies. Only the launching thread changes a row
  // meanwhile.
  void copy(const std::vector<Part>& parts, void* stream);
  // Gradients that stay on the device: in one launch. `kept` aligned to 64.
  void keep(void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream);

 private:
  void begin_row(Row& row, const void* grad, std::vector<Part>& parts);
  void copy_piece(const std::vector<Part>& parts, size_t first, size_t last, void* stream);

  EngineState& state_;
  Lander& lander_;
  Ring ring_;
};

}  // namespace hytrain_fx
