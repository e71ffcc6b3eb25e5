// Other memory under a tensor's storage: whatever shares the storage, views that autograd has saved
// among it, reads what is there from then on. Torch asks a storage for its memory at each launch.
//
// Includes torch's headers, like op_reads.cpp: it is a library of its own.
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace {

void let_go(void* held) { delete static_cast<c10::Storage*>(held); }

}  // namespace

extern "C" {

// `storage` has `bytes` of the memory of `source` from now on, from byte `begin` of it, and keeps
// that memory alive. What it had is given back. Without a source it has no memory. Returns 0, and
// changes nothing, where torch does not let the storage be resized.
int hytrain_fx_put_memory(void* storage, void* source, int64_t begin, int64_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  if (!impl->resizable()) return 0;
  if (!source) {
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
    impl->set_nbytes(static_cast<size_t>(0));
    return 1;
  }
  auto* of = static_cast<c10::StorageImpl*>(source);
  auto* held = new c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(of));
  impl->set_data_ptr_noswap(c10::DataPtr(static_cast<char*>(of->mutable_data()) + begin, held, &let_go, impl->device()));
  impl->set_nbytes(static_cast<size_t>(bytes));
  return 1;
}

}  // extern "C"
