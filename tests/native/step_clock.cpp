// What is told of the times of steps (csrc/step_clock.h). Arguments, in order:
//
//     commit:NOW:ENDED:STREAMS    a commit, and what is told of steps before it: a line
//     cpu:NOW                     an update by the CPU has ended
//     streamed:NOW:AGO            the last states of the step of so many commits ago have come
//     held:US                     the lane stood before them
//
// Compiled and run by tests/cpu/test_balancing.py.
#include "step_clock.h"

#include <cstdio>
#include <cstring>

int main(int count, char** words) {
  hytrain_fx::StepClock clock;
  for (int i = 1; i < count; ++i) {
    double first = 0;
    int second = 0, third = 0;
    std::sscanf(std::strchr(words[i], ':'), ":%lf:%d:%d", &first, &second, &third);
    switch (words[i][1]) {
      case 'o': {
        clock.begin_step(first, first, second != 0, third != 0);
        const hytrain_fx::FinishTimes& told = clock.last();
        std::printf("%g %g %g\n", told.cpu_us, told.streamed_us, told.streamed_held_us);
        break;
      }
      case 'p': clock.updated(first); break;
      case 't': clock.streamed(first, static_cast<uint64_t>(second)); break;
      case 'e': clock.held(first); break;
      default: return 1;
    }
  }
  return 0;
}
