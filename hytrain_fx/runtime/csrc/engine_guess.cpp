// Updates before the factors of their gradients are known. clip_grad_norm_ and GradScaler scale gradients by a number that the device has only
// when the whole backward has run, and mostly it is the same number: 1 where nothing is clipped, 1 / scale. So, once that has been so for
// some steps, rows are updated with the factors that last came twice running, while the backward still runs. GradScaler's word whether the step
// counts at all comes the same way: it is taken to count until then.
//
// The states as they were go to shadow slots, the gradient stays in its slot, and no new weight leaves the host before the factors have come.
// Where they are others, what was updated is put back from its shadow and updated again: bit for bit what it would have been without.
#include <algorithm>
#include <bitset>
#include <cstring>

#include "engine.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hytrain_fx {
namespace {

constexpr int64_t kShadowBlock = 16 << 10;   // parameters saved, then updated: in the cache of one core
constexpr int kRemembered = 16, kLeastOutcomes = 2;
constexpr double kLeastSame = 0.6;  // share of commits with the likely factors from which a guess pays: a miss costs what a hit gains
constexpr int64_t kArrayBytes = kGranule * static_cast<int64_t>(sizeof(float));

// Past the caches: nobody reads it soon, and a plain store would read the line first.
void stream_copy(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; bytes >= 16; bytes -= 16, to += 16, from += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void Engine::set_shadow(const ShadowMemory& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (can_guess_) throw std::logic_error("the engine has shadow memory already");
  for (int s = memory.slots - 1; s >= 0; --s) shadows_.push_back(memory.base + s * 4 * kArrayBytes);
  shadow_slots_ = shadows_.size();
  can_guess_ = memory.slots > 0;
}

// Whether the row can be updated on a guess, and that is worth its shadows.
bool Engine::may_be_redone(const Row& row) const {
  if (!can_guess_ || row.spec.numel < kLeastGuessed) return false;
  return weight_bytes(row) == 4 || row.host.low;  // else its new weight would take the place of the gradient
}

// Whether it pays to go by the row's likely factors.
bool Engine::is_steady(const Row& row) {
  if (row.outcomes < kLeastOutcomes) return row.n_values == 0;
  const uint32_t remembered = row.outcomes < kRemembered ? (1u << row.outcomes) - 1 : (1u << kRemembered) - 1;
  return static_cast<double>(std::bitset<32>(row.same & remembered).count()) >= kLeastSame * std::min(row.outcomes, kRemembered);
}

bool Engine::may_guess(const Row& row, int n_factors) const {
  return n_factors == row.n_values && may_be_redone(row) && is_steady(row);
}

char* Engine::take_shadow() {
  char* shadow = shadows_.back();
  shadows_.pop_back();
  guesses_.shadow_bytes = std::max(guesses_.shadow_bytes, static_cast<int64_t>(shadow_slots_ - shadows_.size()) * 4 * kArrayBytes);
  return shadow;
}

void Engine::factors_came(const Landing& landing) {
  const bool skipped = landing.skip >= 0 && landing.factors[landing.skip] != 0.0f;
  const int64_t redone = guesses_.redone;
  bool guessed = false;
  for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
    Row& row = rows_[r];
    if (row.phase != Phase::PENDING || row.factors_known || row.commit != landing.commit) continue;
    take_factors(row, landing.factors, skipped);
    row.factors_known = true;
    row.skipped = skipped;
    if (row.guessing) {
      guessed = true;
      settle_guess(row, r, false);
    }
    if (skipped) leave_out(row, r);
    queue_all_ready(row, r);
  }
  if (landing.skip >= 0) {
    skip_on_way_ = false;
    skipped_ = skipped;
  }
  guesses_.commits += guessed;
  guesses_.missed += guesses_.redone > redone;
  factors_on_way_[landing.commit % 2] = false;
  issued_cv_.notify_all();
}

// `at_commit`: what was guessed was there when step() came, so the loop was guessed wrong and not a factor.
void Engine::settle_guess(Row& row, int index, bool at_commit) {
  row.guessing = false;
  bool right = !row.skipped;
  for (int i = 0; i < row.n_factors; ++i) {
    right &= std::memcmp(&row.guess[i], &row.factor_values[i], sizeof(float)) == 0;
  }
  if (right && row.bad_guess) return note_failure("CPU update: " + nonfinite_message(index));
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    Chunk& chunk = row.chunks[c];
    if (chunk.shadows.empty() || chunk.put_back) continue;
    const Key key{row.spec.unit, index, c};
    const int64_t params = shadowed(chunk);
    if (row.early) count_early(row, params, !right && at_commit);
    if (!at_commit) {
      guesses_.params += params;
      guesses_.redone += right ? 0 : params;
    }
    if (right) {
      finish_task(key);
      continue;
    }
    ready_.erase(key);
    chunk.queued = chunk.undo = true;
    finish_task(key);
  }
}

int64_t Engine::shadowed(const Chunk& chunk) {
  return std::min<int64_t>(static_cast<int64_t>(chunk.shadows.size()) * kGranule, chunk.end - chunk.begin);
}

void Engine::redo_guessed(const Key& key, Chunk& chunk) {
  chunk.undo = false;
  chunk.redo = 0;
  chunk.redo_end = static_cast<int>(chunk.shadows.size());
  chunk.finished -= chunk.redo_end;
  ready_.insert(key);
  work_cv_.notify_all();
}

// The step was left out: of chunks that nobody has begun nothing happens any more. Others are put back from their shadows.
void Engine::leave_out(Row& row, int index) {
  for (int c = 0; c < static_cast<int>(row.chunks.size()); ++c) {
    if (!row.chunks[c].shadows.empty()) continue;
    ready_.erase({row.spec.unit, index, c});
    chunk_left_out(row);
  }
}

void Engine::chunk_left_out(Row& row) {
  if (++row.issued == static_cast<int>(row.chunks.size())) issued_cv_.notify_all();
}

// The arrays of `n` parameters from the one `from` places into a granule.
std::array<Engine::Span, 5> Engine::spans(const Row& row, const Chunk& chunk, int granule, int64_t from, int64_t n) {
  const int64_t first = chunk.begin + granule * kGranule + from, wide = sizeof(float);
  auto span = [&](void* base, int64_t width, int64_t array) {
    return base ? Span{offset(base, first * width), n * width, array + from * width} : Span{nullptr, 0, 0};
  };
  const HostStates& host = row.host;
  return {{span(host.master, host.low ? 2 : wide, 0), span(host.low, 2, kArrayBytes / 2), span(host.exp_avg, wide, kArrayBytes),
           span(host.exp_avg_sq, wide, 2 * kArrayBytes), span(host.max_exp_avg_sq, wide, 3 * kArrayBytes)}};
}

bool Engine::run_task(Row& row, const Chunk& chunk, const Task& task) {
  const int64_t begin = chunk.begin + task.granule * kGranule, n = std::min(kGranule, chunk.end - begin);
  if (!task.guessed && !task.again) return update_on_host(row, begin, n, task.scalars);
  bool finite = true;
  for (int64_t from = 0; from < n; from += kShadowBlock) {
    const int64_t count = std::min(kShadowBlock, n - from);
    for (const Span& span : spans(row, chunk, task.granule, from, count)) {
      if (!span.at) continue;
      if (task.guessed) {
        stream_copy(task.shadow + span.shadow, span.at, span.bytes);
      } else {
        std::memcpy(span.at, task.shadow + span.shadow, static_cast<size_t>(span.bytes));
      }
    }
    if (!task.restore) finite &= update_on_host(row, begin + from, count, task.scalars);
  }
  return finite;
}

GuessCounts Engine::guess_counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return guesses_;
}

}  // namespace hytrain_fx
