// Other memory for the states of rows that are updated on a guess: shadow slots, of one granule each.
//
// Such an update reads the states where they are and writes them to the other place: from home to the slot, and in a later step from the slot
// home. A right guess makes that the place where they are, a wrong one leaves them where they were. So nothing is copied to be kept, nothing
// is copied back, and an update moves as many bytes as in place. Only masters stay at home, as weights leave from there: what they were is
// kept in the slot meanwhile. drain() carries all states home, for whoever is to read them there.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.h"

namespace hytrain_fx {
namespace {

constexpr int64_t kArrayBytes = kGranule * static_cast<int64_t>(sizeof(float)) + kShadowApartBytes;

// In a slot: the master or its upper half, and the lower half behind that; then the moments and the running maximum.
constexpr int64_t kLowAt = kArrayBytes / 2 / kCacheLineBytes * kCacheLineBytes, kFirstAt = kArrayBytes, kSecondAt = 2 * kArrayBytes, kMaximumAt = 3 * kArrayBytes;

}  // namespace

void Engine::set_shadow(const ShadowMemory& memory) {
  std::lock_guard lock(mutex_);
  if (can_guess_) throw std::logic_error("the engine has shadow memory already");
  if (memory.arrays != 3 && memory.arrays != 4) throw std::out_of_range("arrays in a shadow slot: expected 3 or 4");
  shadow_arrays_ = memory.arrays;
  for (int64_t s = memory.bytes / shadow_slot_bytes() - 1; s >= 0; --s) shadows_.push_back(memory.base + s * shadow_slot_bytes());
  shadow_slots_ = shadows_.size();
  can_guess_ = !shadows_.empty();
}

int64_t Engine::shadow_slot_bytes() const { return shadow_arrays_ * kArrayBytes; }

char* Engine::take_shadow() {
  char* shadow = shadows_.back();
  shadows_.pop_back();
  guesses_.shadow_bytes = std::max(guesses_.shadow_bytes, static_cast<int64_t>(shadow_slots_ - shadows_.size()) * shadow_slot_bytes());
  return shadow;
}

HostArrays Engine::home_of(const Row& row, int64_t begin) {
  const HostStates& host = row.host;
  return {host.low ? host.low + begin : nullptr, host.exp_avg + begin, host.exp_avg_sq + begin,
          host.max_exp_avg_sq ? host.max_exp_avg_sq + begin : nullptr};
}

HostArrays Engine::arrays_in(const Row& row, char* slot) {
  auto floats = [slot](int64_t at) { return reinterpret_cast<float*>(slot + at); };
  return {row.host.low ? reinterpret_cast<uint16_t*>(slot + kLowAt) : nullptr, floats(kFirstAt), floats(kSecondAt),
          row.host.max_exp_avg_sq ? floats(kMaximumAt) : nullptr};
}

void Engine::restore_master(const Row& row, int64_t begin, int64_t n, const char* kept) {
  std::memcpy(offset(row.host.master, begin * master_bytes(row)), kept, static_cast<size_t>(n * master_bytes(row)));
}

// All granules of the chunk were updated, or none counts.
void Engine::settle_shadows(Chunk& chunk, bool updated) {
  for (Shadow& shadow : chunk.shadows) {
    if (!shadow.slot) continue;
    if (updated) shadow.holds = !shadow.holds;
    if (shadow.holds) continue;
    shadows_.push_back(shadow.slot);
    shadow.slot = nullptr;
  }
  chunk.guessed = 0;
}

bool Engine::is_home(const Row& row) {
  return std::none_of(row.chunks.begin(), row.chunks.end(), [](const Chunk& chunk) {
    return std::any_of(chunk.shadows.begin(), chunk.shadows.end(), [](const Shadow& shadow) { return shadow.holds; });
  });
}

// The states of these rows, where no update may change them, go home; also when the engine has failed, and has no workers any more.
void Engine::bring_home(const int32_t* rows, int n, EngineLock& lock) {
  carry_all_home(lock);  // another thread may have asked for the same
  for (int i = 0; i < n; ++i) {
    const Row& row = at(rows[i]);
    if ((row.phase != Phase::IDLE && row.phase != Phase::GRAD) || row.put_back > 0) continue;
    for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
      for (int g = 0; g < row.chunks[c].granules; ++g) {
        if (row.chunks[c].shadows[g].holds) homeward_.push_back({rows[i], c, g});
      }
    }
  }
  homeward_left_ = static_cast<int>(homeward_.size());
  work_cv_.notify_all();
  carry_all_home(lock);
}

// Beside the workers, until none is left.
void Engine::carry_all_home(EngineLock& lock) {
  while (!homeward_.empty()) carry_home(lock);
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), [this] { return homeward_left_ == 0; })) {
    throw std::runtime_error("states that were updated on a guess were not home after " + std::to_string(options_.timeout_s) + " s");
  }
}

// Returns when no update may still change what begins here again, and another thread's drain() carries no states.
void Engine::await_last_step(EngineLock& lock) {
  do {
    carry_all_home(lock);
    end_flagged(lock);
  } while (homeward_left_ > 0);
}

void Engine::carry_home(EngineLock& lock) {
  const auto [r, c, granule] = homeward_.back();
  homeward_.pop_back();
  const Row& row = rows_[r];
  Chunk& chunk = rows_[r].chunks[c];
  Shadow& shadow = chunk.shadows[granule];
  const int64_t begin = chunk.begin + granule * kGranule, n = std::min(kGranule, chunk.end - begin);
  const HostArrays home = home_of(row, begin), there = arrays_in(row, shadow.slot);
  constexpr int64_t wide = sizeof(float);
  lock.unlock();
  if (home.low) stream_copy(home.low, there.low, n * static_cast<int64_t>(sizeof(uint16_t)));
  stream_copy(home.m, there.m, n * wide);
  stream_copy(home.v, there.v, n * wide);
  if (home.vmax) stream_copy(home.vmax, there.vmax, n * wide);
  store_fence();
  lock.lock();
  shadows_.push_back(shadow.slot);
  shadow = {};
  if (--homeward_left_ == 0) issued_cv_.notify_all();
}

}  // namespace hytrain_fx
