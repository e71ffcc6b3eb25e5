#include "row.h"

#include <cstring>

namespace hytrain_fx {

Row::Row(const RowSpec& spec, int index, uint32_t* flags)
    : spec(spec), index(index), parameter_dtype(static_cast<Dtype>(spec.dtype)), grad_dtype(parameter_dtype) {
  for (int64_t begin = 0; begin < spec.numel; begin += kChunk) {
    chunks.emplace_back(begin, std::min(begin + kChunk, spec.numel), flags ? flags + chunks.size() : nullptr);
  }
}

// Whether workers may take chunks whose gradients have landed.
bool Row::may_be_queued() const {
  if (phase != Phase::PENDING && phase != Phase::EARLY) return false;
  return is_armed(Arm::CPU) && (factors_are == Factors::KNOWN || factors_are == Factors::GUESSED);
}

// Not where the new weight has its own memory: if the update failed, what was there before would go
// out as the weight. Nor from memory that is not pinned, which is read before the flag is up.
bool Row::may_be_flagged(bool foreseen) const {
  if (new_weight() != host.master || !host.pinned) return false;
  if (!is_armed(Arm::RELOAD) || !released || factors_are != Factors::KNOWN || is_early()) return false;
  return std::all_of(chunks.begin(), chunks.end(), [this, foreseen](const Chunk& chunk) {
    if (!chunk.flag || chunk.guessed > 0) return false;
    // A weight that rests on the host is fetched on another lane, which would stand at its flag.
    if (chunk.is(ChunkState::AWAITED)) return foreseen && landed_us > 0 && copied_bytes() > 0;
    return chunk.is(ChunkState::QUEUED) || chunk.is(ChunkState::UPDATED) || chunk.is(ChunkState::SENT);
  });
}

bool Row::was_foreseen(const CommitItem& item) const {
  return phase == Phase::EARLY && n_factors == item.n_factors && std::memcmp(&scalars, &item.scalars, sizeof(UpdateScalars)) == 0;
}

bool Row::is_home() const {
  return std::none_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) {
    return std::any_of(chunk.shadows.begin(), chunk.shadows.end(), [](const Shadow& shadow) { return shadow.holds; });
  });
}

bool Row::has_states_for(const UpdateScalars& scalars) const {
  const States& states = place == Place::DEVICE ? device.states : host.states;
  return !(scalars.flags & kAmsgrad) || states.at[2];
}

void Row::begin_chunks() {
  issued = 0;
  for (Chunk& chunk : chunks) chunk.begin_gradient();
}

void Row::begin_update(const CommitItem& item, uint64_t number) {
  if (phase != Phase::EARLY) {
    early_commit.reset();
    busy_us = 0;
  }
  phase = Phase::PENDING;
  guess.make();
  scalars = item.scalars;
  n_factors = item.n_factors;
  std::copy(item.factors, item.factors + kMaxFactors, factors.begin());
  commit = number;
  factors_are = Factors::KNOWN;
}

void Row::take_factors(const float* slots, bool skipped) {
  Guess::Values values{};
  for (int i = 0; i < n_factors; ++i) values[i] = slots[factors[i]];
  guess.learn(values, n_factors, skipped);
  factors_are = skipped ? Factors::SKIPPED : Factors::KNOWN;
}

void Row::end_passed() {
  if (phase == Phase::NEXT_GRAD) begin_chunks();
  phase = phase == Phase::NEXT_GRAD ? Phase::GRAD : Phase::IDLE;
}

void Row::open_at(const EventPtr& event, uint64_t mark) {
  open = event;
  open_mark = mark;
}

void Row::give_weight(const EventPtr& end) {
  weight = end;
  awaited_on.reset();
}

// A 16-bit weight has its own memory (`out`), unless it is half of its master.
const void* Row::new_weight() const { return host.low || weight_bytes() == 4 ? host.master : host.out; }

int64_t Row::streamed_bytes() const {
  int64_t bytes = host.low ? 2 : 4;
  for (const void* state : host.states.at) bytes += state ? host.states.width : 0;
  return bytes;
}

HostArrays Row::home(int64_t begin) const {
  return {host.low ? host.low + begin : nullptr, host.states.from(begin)};
}

void Row::restore_master(int64_t begin, int64_t n, const char* kept) const {
  std::memcpy(offset(host.master, begin * master_bytes()), kept, static_cast<size_t>(n * master_bytes()));
}

}  // namespace hytrain_fx
