"""Time from `compile()` to the first full-speed step, cut into phases without gap or overlap.

    compile():   setup | engine | host memory, masters
    the loop:    before the first forward
    steps:       compile forward, passes, compile backward | warm-up steps | plan |
                 moving states | first full-speed step

At any moment the clock is in one phase. A phase within another takes its time out of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What is being done; the name of its field in `Startup`."""

    SETUP = "setup"
    ENGINE = "engine"
    HOST_MEMORY = "host_memory"
    MASTERS = "masters"
    LOOP = "loop"
    COMPILE_FORWARD = "compile_forward"
    COMPILE_BACKWARD = "compile_backward"
    PASSES = "passes"
    WARM_UP = "warm_up"
    PLAN = "plan"
    MOVE = "move"
    FIRST_STEP = "first_step"


@dataclass(frozen=True, slots=True)
class Startup:
    """Microseconds of each phase.

    setup_us             reading model and optimizer, guarding parameters
    engine_us            engine library built or loaded, kernels compiled, ring allocated, threads
                         started
    host_memory_us       pages of the host's slabs made, and registered with the GPU's driver
    masters_us           states allocated on the device, masters written (with the model on the CPU:
                         host pages are made by it)
    loop_us              between `compile()` and the first forward: the loop's own time, and loading
                         states of an earlier run
    compile_forward_us   the first compiled call, tracing included, and graphs compiled in later
                         ones
    compile_backward_us  backward graphs compiled
    passes_us            this library's passes on all graphs
    warm_up_us           the rest of the steps before full speed
    plan_us, move_us     solving the plan; moving states to where it has them
    first_step_us        the first step at full speed, up to the return of step(); 0 while
                         `complete` is False
    warm_up_steps        steps before it
    pinned_bytes         host memory pinned within compile()
    complete             whether it has ended
    """

    setup_us: float
    engine_us: float
    host_memory_us: float
    masters_us: float
    loop_us: float
    compile_forward_us: float
    compile_backward_us: float
    passes_us: float
    warm_up_us: float
    plan_us: float
    move_us: float
    first_step_us: float
    warm_up_steps: int
    pinned_bytes: int
    complete: bool

    def spent_us(self, phase: Phase) -> float:
        """Microseconds of one phase."""
        found: float = getattr(self, f"{phase}_us")
        return found

    @property
    def total_us(self) -> float:
        """From the call of `compile()` to the end of the first full-speed step, or to now."""
        return sum(self.spent_us(phase) for phase in Phase)

    @property
    def own_us(self) -> float:
        """What this library adds.

        That is all except torch.compile's own time, the loop's, and the first full-speed step.
        """
        return self.total_us - self.compile_forward_us - self.compile_backward_us - self.loop_us - self.first_step_us

    @property
    def pinned_gb_per_s(self) -> float:
        """10^9 bytes made and registered in a second; 0 where there were none."""
        return self.pinned_bytes / self.host_memory_us / 1e3 if self.pinned_bytes and self.host_memory_us else 0.0


class StartupClock:
    """Adds up the phases until the first full-speed step has ended.

    From then on every call returns at once.

    The backward is compiled on a thread of autograd, while the launching thread waits for it: calls
    never overlap.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._spent_s = dict.fromkeys(Phase, 0.0)
        self._phases = [Phase.SETUP]
        self._since_s = now_s()
        self._warm_up_steps = 0
        self.pinned_bytes = 0
        self.running = True

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """The block is in this phase."""
        return self._within(phase) if self.running else contextlib.nullcontext()

    def open(self, phase: Phase) -> None:
        """In this phase from here to `close`."""
        if self.running:
            self._settle()
            self._phases.append(phase)

    def close(self, phase: Phase) -> None:
        """The end of what `open` began, if it did."""
        if self.running and len(self._phases) > 1 and self._phases[-1] is phase:
            self._settle()
            self._phases.pop()

    def built(self) -> None:
        """`compile()` is done; what follows is the loop's."""
        self._turn_to(Phase.LOOP)

    def forward_begins(self, full_speed: bool) -> None:
        """A step begins, or goes on with a second forward."""
        if self.running:
            self._turn_to(Phase.FIRST_STEP if full_speed else Phase.WARM_UP)

    def step_ends(self) -> bool:
        """Whether that was the first full-speed step: the clock has stopped."""
        if not self.running:
            return False
        if self._phases == [Phase.FIRST_STEP]:
            self._settle()
            self.running = False
            return True
        self._warm_up_steps += 1
        return False

    def reassign(self, source: Phase, target: Phase, us: float) -> None:
        """Microseconds counted in one phase belong to another."""
        self._settle()
        us = min(us, self._spent_s[source] * 1e6)
        self._spent_s[source] -= us / 1e6
        self._spent_s[target] += us / 1e6

    def report(self) -> Startup:
        """The phases so far."""
        if self.running:
            self._settle()
        spent_us = {f"{phase}_us": seconds * 1e6 for phase, seconds in self._spent_s.items()}
        return Startup(**spent_us, warm_up_steps=self._warm_up_steps, pinned_bytes=self.pinned_bytes, complete=not self.running)

    @contextlib.contextmanager
    def _within(self, phase: Phase) -> Iterator[None]:
        self.open(phase)
        try:
            yield
        finally:
            self.close(phase)

    def _turn_to(self, phase: Phase) -> None:
        self._settle()
        self._phases[0] = phase

    def _settle(self) -> None:
        now_s = self._now_s()
        self._spent_s[self._phases[-1]] += now_s - self._since_s
        self._since_s = now_s
