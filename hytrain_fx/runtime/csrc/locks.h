// The locks of the engine, in the one order in which a thread may take them.
//
//   session `calls`    Python (session/turns.py): a thread is in the compiled call, or in step()
//   session `compiles` Python (session/turns.py): a graph is compiled
//   session `state`    Python (session/turns.py): a thread changes or reads what the session keeps
//   kEngine            EngineState::mutex: rows, chunks and their queues
//   kQueue             WorkQueue::mutex_, LaneSigns::mutex: what a lane of the device has to do
//   kEvent             CpuEvent::mutex_: whether the event has fired
//   kEventPool         EventPool::mutex_: CUDA events that are free
//
// A thread that holds a lock takes only later ones. The engine's threads take none of Python's
// locks, nor the GIL: calls into the engine release it. In a build with HYTRAIN_FX_CHECK_LOCKS
// (scripts/race_check and the tests in C++) every lock checks this, and a wrong order ends the
// program with both names. Without it the locks are std::mutex.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>

namespace hytrain_fx {

enum class LockOrder : unsigned { kEngine, kQueue, kEvent, kEventPool };

#ifdef HYTRAIN_FX_CHECK_LOCKS

inline constexpr const char* kLockNames[] = {"engine", "queue", "event", "event pool"};

class HeldLocks {
 public:
  static void take(LockOrder next) {
    const unsigned place = static_cast<unsigned>(next);
    for (unsigned held = place; held < std::size(kLockNames); ++held)
      if (held_ & 1u << held) {
        std::fprintf(stderr, "lock order: '%s' is taken while '%s' is held; the order is in csrc/locks.h\n", kLockNames[place], kLockNames[held]);
        std::abort();
      }
    held_ |= 1u << place;
  }
  static void give(LockOrder last) { held_ &= ~(1u << static_cast<unsigned>(last)); }

 private:
  static inline thread_local unsigned held_ = 0;  // a bit each
};

template <LockOrder order>
class OrderedMutex {
 public:
  void lock() {
    HeldLocks::take(order);
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
    HeldLocks::give(order);
  }

 private:
  std::mutex mutex_;
};

using Condition = std::condition_variable_any;

#else

template <LockOrder>
using OrderedMutex = std::mutex;
using Condition = std::condition_variable;

#endif

using EngineMutex = OrderedMutex<LockOrder::kEngine>;
using EngineLock = std::unique_lock<EngineMutex>;

}  // namespace hytrain_fx
