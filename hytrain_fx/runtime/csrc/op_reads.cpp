// Which of the watched tensors an operator is about to read or to write: asked before each operator
// that eager code calls, by torch's own callback (ATen/record_function.h), which profilers use too.
//
// An operator is every dispatched one and every autograd.Function, in this thread, with its tensors
// and lists of tensors. What reads memory without an operator (data_ptr(), pickle) is not seen.
// The only file that includes torch's headers: it is a library of its own.
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace {

using OnRead = void (*)(const void* storage, int written);

// What was told of a storage since the last `again`.
struct Told {
  bool read = false, written = false;
  c10::StreamId stream = 0;  // on which it was told last
};

struct Watch {
  OnRead on_read;
  std::unordered_map<const void*, Told> storages;  // changed by the thread that watches only
};

// Watches that are on, the first to begin first. A model may be called inside another's forward.
thread_local std::vector<Watch*> t_watches;
thread_local at::CallbackHandle t_callback = 0;

// The stream that work for this tensor's device goes to; one number where there is one stream.
c10::StreamId stream_of(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (!device.is_cuda()) return 0;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// One operator's inputs. Its schema says which it writes; copying one takes some microseconds, so
// it is looked at for watched tensors only.
class Inputs {
 public:
  explicit Inputs(const at::RecordFunction& call) : call_(call) {}

  void see_all() {
    for (const c10::IValue& input : call_.inputs()) {
      see(input);
      ++at_;
    }
  }

 private:
  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isList()) {
      for (const at::IValue& item : value.toListRef()) see(item);
    }
  }

  void see(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < t_watches.size(); ++i) {
      Watch* watch = t_watches[i];
      const auto found = watch->storages.find(storage);
      if (found == watch->storages.end()) continue;
      Told& told = found->second;
      const bool writes = !told.written && is_written();
      const c10::StreamId stream = stream_of(tensor);
      if (told.read && told.stream == stream && !writes) continue;
      told = {true, told.written || writes, stream};
      std::vector<Watch*> on;
      on.swap(t_watches);  // what the answer itself runs is not watched
      watch->on_read(storage, writes);
      t_watches.swap(on);
    }
  }

  // Whether the operator writes the input that is looked at, or the tensors of that list.
  bool is_written() {
    if (!asked_) schema_ = call_.operator_schema();
    asked_ = true;
    if (!schema_ || at_ >= schema_->arguments().size()) return false;
    const c10::AliasInfo* alias = schema_->arguments()[at_].alias_info();
    if (alias == nullptr) return false;
    const auto& items = alias->containedTypes();
    return alias->isWrite() || std::any_of(items.begin(), items.end(), [](const c10::AliasInfo& of) { return of.isWrite(); });
  }

  const at::RecordFunction& call_;
  size_t at_ = 0;
  bool asked_ = false;
  std::optional<c10::FunctionSchema> schema_;
};

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (!t_watches.empty()) Inputs(call).see_all();
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
// it: once, and again where another stream is the next to read it. And once where one writes it.
void* hytrain_fx_watch_make(OnRead on_read) { return new Watch{on_read, {}}; }
void hytrain_fx_watch_free(void* watch) { delete static_cast<Watch*>(watch); }

void hytrain_fx_watch_add(void* watch, const void* const* storages, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<Watch*>(watch)->storages[storages[i]] = {};
}

// Nothing has been told of any.
void hytrain_fx_watch_again(void* watch) {
  for (auto& each : static_cast<Watch*>(watch)->storages) each.second = {};
}

void hytrain_fx_watch_clear(void* watch) { static_cast<Watch*>(watch)->storages.clear(); }

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
