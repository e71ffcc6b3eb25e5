// The engine's C interface, called through ctypes: 0 is success, anything else leaves its message
// in hytrain_error().
#include <string>

#include "engine.h"

namespace {

thread_local std::string error_message;

template <class Call>
int guarded(Call call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    error_message = error.what();
    return 1;
  }
}

using hytrain_fx::Engine;

// For calls that use the device. What they have begun when it refuses something cannot be finished,
// so no later call may build on it.
template <class Call>
int guarded(Engine* engine, Call call) {
  return guarded([&] {
    try {
      call();
    } catch (const hytrain_fx::DeviceError& error) {
      engine->fail(error.what());
      throw;
    }
  });
}

}  // namespace

extern "C" {

const char* hytrain_error() { return error_message.c_str(); }

int hytrain_create(const hytrain_fx::EngineOptions* options, Engine** out) {
  return guarded([&] { *out = new Engine(*options); });
}
int hytrain_destroy(Engine* engine) {
  return guarded([&] { delete engine; });
}
int hytrain_add_row(Engine* engine, const hytrain_fx::RowSpec* spec) {
  return guarded(engine, [&] { engine->add_row(*spec); });
}
int hytrain_set_unit(Engine* engine, int row, int unit) {
  return guarded(engine, [&] { engine->set_unit(row, unit); });
}
int hytrain_set_weight(Engine* engine, int row, void* weight) {
  return guarded(engine, [&] { engine->set_weight(row, weight); });
}
int hytrain_use_copy(Engine* engine, int row, void* copy) {
  return guarded(engine, [&] { engine->use_copy(row, copy); });
}
int hytrain_set_gradient_dtype(Engine* engine, int row, int dtype) {
  return guarded(engine, [&] { engine->set_gradient_dtype(row, static_cast<hytrain_fx::Dtype>(dtype)); });
}
int hytrain_place_on_host(Engine* engine, int row, const hytrain_fx::HostStates* states) {
  return guarded(engine, [&] { engine->place_on_host(row, *states); });
}
int hytrain_place_on_device(Engine* engine, int row, const hytrain_fx::DeviceStates* states) {
  return guarded(engine, [&] { engine->place_on_device(row, *states); });
}
int hytrain_set_staging(Engine* engine, const hytrain_fx::StagingMemory* memory) {
  return guarded(engine, [&] { engine->set_staging(*memory); });
}
int hytrain_set_ring(Engine* engine, void* memory, uint64_t bytes) {
  return guarded(engine, [&] { engine->set_ring(memory, bytes); });
}
int hytrain_set_shadow(Engine* engine, const hytrain_fx::ShadowMemory* memory) {
  return guarded(engine, [&] { engine->set_shadow(*memory); });
}
int hytrain_finish_times(Engine* engine, hytrain_fx::FinishTimes* out) {
  return guarded(engine, [&] { *out = engine->finish_times(); });
}
int hytrain_guess_counts(Engine* engine, hytrain_fx::GuessCounts* out) {
  return guarded(engine, [&] { *out = engine->guess_counts(); });
}
int hytrain_send_weight(Engine* engine, int row, int on) {
  return guarded(engine, [&] { engine->send_weight(row, on != 0); });
}
int hytrain_place_streamed(Engine* engine, int row, const hytrain_fx::HostStates* states) {
  return guarded(engine, [&] { engine->place_streamed(row, *states); });
}
int hytrain_grad_offload(Engine* engine, const int32_t* rows, const void* const* grads, int n, void* stream) {
  return guarded(engine, [&] { engine->grad_offload(rows, grads, n, stream); });
}
int hytrain_keep_grads(Engine* engine, void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream) {
  return guarded(engine, [&] { engine->keep_grads(kept, grads, bytes, n, stream); });
}
int hytrain_arm_cpu(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->arm_cpu(rows, n); });
}
int hytrain_arm_gpu(Engine* engine, const int32_t* rows, int n, void* stream) {
  return guarded(engine, [&] { engine->arm_gpu(rows, n, stream); });
}
int hytrain_arm_reload(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->arm_reload(rows, n); });
}
int hytrain_release(Engine* engine, const int32_t* rows, int n, void* stream) {
  return guarded(engine, [&] { engine->release(rows, n, stream); });
}
int hytrain_commit(Engine* engine, const hytrain_fx::CommitItem* items, int n, const void* const* factors, int n_factors, int skip,
                   void* stream) {
  return guarded(engine, [&] { engine->commit(items, n, factors, n_factors, skip, stream); });
}
int hytrain_commit_early(Engine* engine, const int32_t* rows, int n, const hytrain_fx::UpdateScalars* scalars, int workers) {
  return guarded(engine, [&] { engine->commit_early(rows, n, *scalars, workers); });
}
int hytrain_early_counts(Engine* engine, hytrain_fx::EarlyCounts* out) {
  return guarded(engine, [&] { *out = engine->early_counts(); });
}
int hytrain_skipped(Engine* engine, int* out) {
  return guarded(engine, [&] { *out = engine->skipped() ? 1 : 0; });
}
int hytrain_knows_skipped(Engine* engine, int* out) {
  return guarded(engine, [&] { *out = engine->knows_skipped() ? 1 : 0; });
}
int hytrain_wait(Engine* engine, const int32_t* rows, int n, void* stream) {
  return guarded(engine, [&] { engine->wait(rows, n, stream); });
}
int hytrain_settle(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->settle(rows, n); });
}
int hytrain_drain(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->drain(rows, n); });
}
int hytrain_fetch(Engine* engine, const int32_t* rows, int n, void* dst, int64_t dst_bytes, void* stream, uint64_t* fetch) {
  return guarded(engine, [&] { *fetch = engine->fetch(rows, n, dst, dst_bytes, stream); });
}
int hytrain_fetched(Engine* engine, uint64_t fetch, void* stream) {
  return guarded(engine, [&] { engine->fetched(fetch, stream); });
}
int hytrain_landed(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->landed(rows, n); });
}
int hytrain_discard(Engine* engine, const int32_t* rows, int n) {
  return guarded(engine, [&] { engine->discard(rows, n); });
}
int hytrain_pending(Engine* engine, int row, int* out) {
  return guarded(engine, [&] { *out = engine->pending(row) ? 1 : 0; });
}
int hytrain_issued(Engine* engine, const int32_t* rows, int n, int* out) {
  return guarded(engine, [&] { *out = engine->issued(rows, n) ? 1 : 0; });
}
int hytrain_factor_slots(Engine* engine, float** out) {
  return guarded(engine, [&] { *out = engine->factor_slots(); });
}
int hytrain_set_delay(Engine* engine, int stage, double mean_us) {
  return guarded(engine, [&] { engine->set_delay(stage, mean_us); });
}
int hytrain_fail_next_update(Engine* engine, int row) {
  return guarded(engine, [&] { engine->fail_next_update(row); });
}
int hytrain_fail_next_copy(Engine* engine, int row) {
  return guarded(engine, [&] { engine->fail_next_copy(row); });
}
int hytrain_fail_device_after(Engine* engine, int operations) {
  return guarded(engine, [&] { engine->fail_device_after(operations); });
}
int hytrain_record(Engine* engine, int on) {
  return guarded(engine, [&] { engine->record(on != 0); });
}
int hytrain_take_records(Engine* engine, hytrain_fx::TaskRecord* out, int capacity, int* taken) {
  return guarded(engine, [&] { *taken = engine->take_records(out, capacity); });
}
int hytrain_cpu_update_us(Engine* engine, int row, double* out) {
  return guarded(engine, [&] { *out = engine->cpu_update_us(row); });
}

}  // extern "C"
