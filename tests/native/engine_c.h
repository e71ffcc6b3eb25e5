// The engine's C interface (csrc/engine_c.cpp), as ctypes sees it.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "engine.h"

extern "C" {
const char* hytrain_error();
int hytrain_create(const hytrain_fx::EngineOptions*, hytrain_fx::Engine**);
int hytrain_destroy(hytrain_fx::Engine*);
int hytrain_add_row(hytrain_fx::Engine*, const hytrain_fx::RowSpec*);
int hytrain_place_on_host(hytrain_fx::Engine*, int, const hytrain_fx::HostStates*);
int hytrain_place_on_device(hytrain_fx::Engine*, int, const hytrain_fx::DeviceStates*);
int hytrain_place_streamed(hytrain_fx::Engine*, int, const hytrain_fx::HostStates*);
int hytrain_set_staging(hytrain_fx::Engine*, const hytrain_fx::StagingMemory*);
int hytrain_set_ring(hytrain_fx::Engine*, void*, uint64_t);
int hytrain_set_shadow(hytrain_fx::Engine*, const hytrain_fx::ShadowMemory*);
int hytrain_set_unit(hytrain_fx::Engine*, int, int);
int hytrain_send_weight(hytrain_fx::Engine*, int, int);
int hytrain_finish_times(hytrain_fx::Engine*, hytrain_fx::FinishTimes*);
int hytrain_set_weight(hytrain_fx::Engine*, int, void*);
int hytrain_use_copy(hytrain_fx::Engine*, int, void*);
int hytrain_set_gradient_dtype(hytrain_fx::Engine*, int, int);
int hytrain_guess_counts(hytrain_fx::Engine*, hytrain_fx::GuessCounts*);
int hytrain_grad_offload(hytrain_fx::Engine*, const int32_t*, const void* const*, int, void*);
int hytrain_keep_grads(hytrain_fx::Engine*, void* const*, const void* const*, const int64_t*, int, void*);
int hytrain_arm_cpu(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_arm_gpu(hytrain_fx::Engine*, const int32_t*, int, void*);
int hytrain_arm_reload(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_release(hytrain_fx::Engine*, const int32_t*, int, void*);
int hytrain_commit(hytrain_fx::Engine*, const hytrain_fx::CommitItem*, int, const void* const*, int, int, void*);
int hytrain_commit_early(hytrain_fx::Engine*, const int32_t*, int, const hytrain_fx::UpdateScalars*, int);
int hytrain_early_counts(hytrain_fx::Engine*, hytrain_fx::EarlyCounts*);
int hytrain_skipped(hytrain_fx::Engine*, int*);
int hytrain_knows_skipped(hytrain_fx::Engine*, int*);
int hytrain_wait(hytrain_fx::Engine*, const int32_t*, int, void*);
int hytrain_settle(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_drain(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_fetch(hytrain_fx::Engine*, const int32_t*, int, void*, int64_t, void*, uint64_t*);
int hytrain_fetched(hytrain_fx::Engine*, uint64_t, void*);
int hytrain_landed(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_discard(hytrain_fx::Engine*, const int32_t*, int);
int hytrain_pending(hytrain_fx::Engine*, int, int*);
int hytrain_factor_slots(hytrain_fx::Engine*, float**);
int hytrain_set_delay(hytrain_fx::Engine*, int, double);
int hytrain_fail_device_after(hytrain_fx::Engine*, int);
int hytrain_fail_next_copy(hytrain_fx::Engine*, int);
int hytrain_record(hytrain_fx::Engine*, int);
int hytrain_take_records(hytrain_fx::Engine*, hytrain_fx::TaskRecord*, int, int*);
int hytrain_cpu_update_us(hytrain_fx::Engine*, int, double*);
}

// Of an engine on the CPU device whose commits have one factor at most. The memory is the caller's.
inline hytrain_fx::EngineOptions options_on_cpu(int workers, std::vector<char>& ring, std::vector<float>& factors) {
  hytrain_fx::EngineOptions options{};
  options.workers = workers;
  options.device_ordinal = -1;
  options.timeout_s = 30;
  options.ring = ring.data();
  options.ring_bytes = ring.size();
  options.factor_slots = factors.data();  // two halves
  options.factor_capacity = static_cast<int32_t>(factors.size() / 2);
  return options;
}

// AdamW with fp32 gradients, at some step.
inline const hytrain_fx::UpdateScalars kScalars{1.0f, 0.0f, 0.1f, 0.95f, 0.05f, -0.01f, 1.0f, 1e-8f, 0, 0, {}, {}};

// Of a call of the engine: where it failed, its message, and the end of the program.
inline void check(int status) {
  if (status == 0) return;
  std::fprintf(stderr, "%s\n", hytrain_error());
  std::exit(1);
}

// On the CPU device, with its memory and staging for rows of `size`. Whoever makes it destroys the engine.
struct EngineOnCpu {
  EngineOnCpu(int workers, int64_t size, int32_t slots, int32_t queue_places = 0)
      : ring(1 << 20), factors(2), staging(slots * 3 * size) {
    hytrain_fx::EngineOptions options = options_on_cpu(workers, ring, factors);
    options.queue_places = queue_places;
    check(hytrain_create(&options, &engine));
    const hytrain_fx::StagingMemory memory{staging.data(), size, 3, slots};
    check(hytrain_set_staging(engine, &memory));
  }
  std::vector<char> ring;
  std::vector<float> factors, staging;
  hytrain_fx::Engine* engine = nullptr;
};

struct F32Row {
  explicit F32Row(int64_t size) : weight(size, 1.0f), master(weight), grad(size, 0.5f), m(size), v(size) {}
  std::vector<float> weight, master, grad, m, v;
};

// Adds it as row `r` of a unit, updated by the CPU or streamed; what a commit needs of it. `slot`: for
// its gradient, or null.
inline hytrain_fx::CommitItem add_row(hytrain_fx::Engine* engine, int32_t r, int32_t unit, F32Row& row, float* slot, bool is_streamed) {
  hytrain_fx::RowSpec spec{static_cast<int64_t>(row.weight.size()), unit, static_cast<int32_t>(hytrain_fx::Dtype::kF32), row.weight.data()};
  check(hytrain_add_row(engine, &spec));
  hytrain_fx::HostStates states{row.master.data(), nullptr, {{row.m.data(), row.v.data(), nullptr}}, slot, nullptr, 1};
  check(is_streamed ? hytrain_place_streamed(engine, r, &states) : hytrain_place_on_host(engine, r, &states));
  hytrain_fx::CommitItem item{};
  item.row = r;
  item.grad = is_streamed ? row.grad.data() : nullptr;
  item.scalars = kScalars;
  return item;
}

// Records of one kind, by step, in the order in which they began: each row has one in a step. `most`: of
// all kinds. Waits for the updates of the first `rows` rows.
inline std::vector<std::vector<hytrain_fx::TaskRecord>> records_by_step(hytrain_fx::Engine* engine, size_t rows, int32_t kind, int steps,
                                                                        int most) {
  std::vector<int32_t> all(rows);
  std::iota(all.begin(), all.end(), 0);
  check(hytrain_drain(engine, all.data(), static_cast<int>(rows)));
  std::vector<hytrain_fx::TaskRecord> records(most);
  int n = 0;
  check(hytrain_take_records(engine, records.data(), most, &n));
  const auto is_before = [](const hytrain_fx::TaskRecord& a, const hytrain_fx::TaskRecord& b) { return a.begin_us < b.begin_us; };
  std::sort(records.begin(), records.begin() + n, is_before);
  std::vector<std::vector<hytrain_fx::TaskRecord>> found(steps);
  std::vector<int> seen(rows);
  for (int i = 0; i < n; ++i) {
    if (records[i].kind == kind) found[seen[records[i].row]++].push_back(records[i]);
  }
  return found;
}
