// Which of the watched tensors an operator is about to read: asked before each operator that eager
// code calls, by torch's own callback (ATen/record_function.h), which profilers use too.
//
// An operator is every dispatched one and every autograd.Function, in this thread, with its tensors
// and lists of tensors. What reads memory without an operator (data_ptr(), pickle) is not seen.
// The only file that includes torch's headers: it is a library of its own.
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

namespace {

using OnRead = void (*)(const void* storage);

struct Watch {
  OnRead on_read;
  std::unordered_set<const void*> storages;  // changed by the thread that watches only
  std::vector<const void*> told;             // since the last `again`
};

// Watches that are on, the first to begin first. A model may be called inside another's forward.
thread_local std::vector<Watch*> t_watches;
thread_local at::CallbackHandle t_callback = 0;

void see(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < t_watches.size(); ++i) {
    Watch* watch = t_watches[i];
    if (watch->storages.erase(storage) == 0) continue;
    watch->told.push_back(storage);
    std::vector<Watch*> on;
    on.swap(t_watches);  // what the answer itself runs is not watched
    watch->on_read(storage);
    t_watches.swap(on);
  }
}

void see(const c10::IValue& value) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const at::IValue& item : value.toListRef()) see(item);
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (!t_watches.empty())
    for (const c10::IValue& input : call.inputs()) see(input);
  return nullptr;
}

// The callback is on in this thread only while something is watched: elsewhere operators cost
// nothing more.
void follow_watches() {
  if (!t_watches.empty() && t_callback == 0) {
    t_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&before_operator)
                                                .needsInputs(true)
                                                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  } else if (t_watches.empty() && t_callback != 0) {
    at::removeCallback(t_callback);
    t_callback = 0;
  }
}

}  // namespace

extern "C" {

// `on_read` gets a watched storage before the operator that reads it runs, in the thread that runs
// it; then the storage is no longer watched.
void* hytrain_fx_watch_make(OnRead on_read) { return new Watch{on_read, {}, {}}; }
void hytrain_fx_watch_free(void* watch) { delete static_cast<Watch*>(watch); }

void hytrain_fx_watch_add(void* watch, const void* const* storages, int64_t n) {
  static_cast<Watch*>(watch)->storages.insert(storages, storages + n);
}

// Those that were told are watched again.
void hytrain_fx_watch_again(void* watch) {
  auto* of = static_cast<Watch*>(watch);
  of->storages.insert(of->told.begin(), of->told.end());
  of->told.clear();
}

void hytrain_fx_watch_clear(void* watch) {
  static_cast<Watch*>(watch)->storages.clear();
  static_cast<Watch*>(watch)->told.clear();
}

void hytrain_fx_watch_on(void* watch) {
  t_watches.push_back(static_cast<Watch*>(watch));
  follow_watches();
}

// Off in this thread; 0 where it was not on.
int hytrain_fx_watch_off(void* watch) {
  const auto found = std::find(t_watches.begin(), t_watches.end(), static_cast<Watch*>(watch));
  if (found == t_watches.end()) return 0;
  t_watches.erase(found);
  follow_watches();
  return 1;
}

}  // extern "C"
