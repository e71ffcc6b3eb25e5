// The lander: it waits for what comes to the host, in the order in which it was sent, and notifies
// whoever goes on from there.
#pragma once

#include <deque>
#include <vector>

#include "guesses.h"

namespace hytrain_fx {

struct Part {  // one chunk of a gradient on its way to its slot
  int row, chunk;
  uint64_t generation;
  const void* source;
  char* slot;
  int64_t bytes;
};

struct GradLanding {  // of one copy
  EventPtr begin, event;  // `begin`: while recording
  std::vector<Part> parts;
  uint64_t mark = 0;  // of the compute stream's last event before
};

class Lander {
 public:
  Lander(EngineState& state, Guesses& guesses) : state_(state), guesses_(guesses) {}

  // With the lock held.
  void expect(const std::vector<GradLanding>& landings);
  void expect(const FactorLanding& landing);
  void expect_end(const EventPtr& event, uint64_t mark);  // of a backward

  void run();  // its thread's

 private:
  struct Landing {
    GradLanding grads;
    FactorLanding factors;  // where there are no parts
    EventPtr end;           // of a backward, else null
    uint64_t end_mark = 0;
  };
  bool await(Event& event, EngineLock& lock);
  void grads_came(const GradLanding& landing);
  void note_landed(Row& row) const;
  void backward_ended(uint64_t mark) const;

  EngineState& state_;
  Guesses& guesses_;
  std::deque<Landing> landings_;
};

}  // namespace hytrain_fx
