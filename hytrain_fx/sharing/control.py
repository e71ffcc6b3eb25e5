"""Which share of a batch the CPU trains next: measured, solved, and adjusted with patience.

    ALONE      the device trains everything: steps without a share are timed
    TRIAL      the CPU trains one sequence: its rate is measured beside the device's work
    SHARING    a solved share; other times give another one, once two windows in a row ask for it
    NONE       it does not pay, as calculated or as measured: 0, for good
    FIXED      the loop's own fraction

After each change some steps are not counted: another shape is compiled, and caches fill.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, CpuShare, ShareTimes, best_share
from hytrain_fx.ir.figures import time_text

ALONE_STEPS: Final = 5
TRIAL_STEPS: Final = 5
WINDOW_STEPS: Final = 6
"""Steps whose medians are looked at together."""
SETTLING_STEPS: Final = 2
_STRIKES: Final = 2  # windows in a row: another share is wanted, or steps are not shorter than without one
_MOST_PATIENCE: Final = 8


class Phase(StrEnum):
    """What the controller is about."""

    ALONE = "the device alone is timed"
    TRIAL = "the CPU's rate is measured"
    SHARING = "sharing"
    NONE = "no share pays"
    FIXED = "a fixed share"


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What one batch took, in microseconds.

    sequences, by_cpu   of the batch, and those of them that the CPU trained
    device_us   forward and backward of the device's part
    begin_us    from the device's begin to the CPU's: launching, and waiting for weights
    cpu_us      forward and backward of the CPU's part
    join_us     adding its gradients
    step_us     from this batch's begin to the next one's
    """

    sequences: int
    by_cpu: int
    device_us: float
    begin_us: float
    cpu_us: float
    join_us: float
    step_us: float

    @property
    def both_us(self) -> float:
        """From the begin until both parts are done."""
        return max(self.device_us, self.begin_us + self.cpu_us) + self.join_us if self.by_cpu else self.device_us


Together = Callable[[ShareTimes], tuple[CpuShare, float]]


class ShareControl:
    """The share of one model.

    wanted     "auto", or a fraction of each batch from 0 to less than 1
    together   gives from the trial's times the share that is solved together with the states, and
               what its steps take beside it; None: by these times alone

    solved   the last solution, None before there is one
    """

    def __init__(self, wanted: object, together: Together | None = None) -> None:
        self._together = together
        self.phase = Phase.ALONE if wanted == "auto" else Phase.FIXED
        self.fraction = float(wanted) if isinstance(wanted, (int, float)) else 0.0
        self.solved: CpuShare | None = None
        self.moves = 0
        self._seen: list[SharedStep] = []
        self._settling = SETTLING_STEPS
        self._alone_us = 0.0  # a sequence: steps with the device alone, as they were timed
        self._around_us = 0.0  # of them, a batch: with the device not at work
        self._proven = False  # steps with a share have been shorter than those
        self._asked: list[int] = []  # windows in a row that want more (1) or less (-1) than now
        self._slower = 0
        self._patience = _STRIKES
        self._last_move = 0

    def by_cpu(self, sequences: int) -> int:
        """How many sequences of a batch of so many the CPU is to train. The device keeps one."""
        wanted = {Phase.ALONE: 0, Phase.NONE: 0, Phase.TRIAL: 1}.get(self.phase, round(self.fraction * sequences))
        return max(0, min(wanted, sequences - 1))

    @property
    def may_share(self) -> bool:
        """Whether a batch may still be split."""
        return self.phase is not Phase.NONE

    @property
    def holds_states(self) -> bool:
        """Whether states are to stay: steps are longer or shorter for the share's sake."""
        return self.phase in (Phase.TRIAL, Phase.SHARING)

    def saw(self, step: SharedStep) -> None:
        """A batch has been trained."""
        if self.phase in (Phase.FIXED, Phase.NONE) or step.sequences < 2 or step.by_cpu != self.by_cpu(step.sequences):
            self._note_fixed(step)
            return
        if self.holds_states and not step.by_cpu:
            return  # a batch too small to be shared tells no rate of the CPU
        if self._settling:
            self._settling -= 1
            return
        self._seen.append(step)
        enough = {Phase.ALONE: ALONE_STEPS, Phase.TRIAL: TRIAL_STEPS}.get(self.phase, WINDOW_STEPS)
        if len(self._seen) >= enough:
            {Phase.ALONE: self._end_alone, Phase.TRIAL: self._end_trial}.get(self.phase, self._end_window)()
            self._seen = []

    def _note_fixed(self, step: SharedStep) -> None:
        if self.phase is Phase.FIXED:
            self._seen = [*self._seen[-WINDOW_STEPS:], step]

    def _end_alone(self) -> None:
        self._alone_us = _median(self._seen, lambda step: step.step_us / step.sequences)
        self._around_us = max(0.0, _median(self._seen, lambda step: step.step_us - step.device_us))
        self._enter(Phase.TRIAL)

    def _end_trial(self) -> None:
        if self._together is None:
            solved = self._solve()
        else:
            solved, self._around_us = self._together(times_of(self._seen, self._around_us))
            self.solved = solved
        self._take(solved) if solved.by_cpu else self._give_up(solved)

    def _end_window(self) -> None:
        solved = self._solve()
        present = self.by_cpu(solved.sequences)
        wanted = solved.by_cpu or min(solved.best, present)  # where none pays, not more than now
        direction = (wanted > present) - (wanted < present)
        if not direction and self._is_no_shorter(solved):
            self._give_up(solved)
            return
        if not direction or (self._asked and self._asked[-1] != direction):
            self._asked = []
        if direction:
            self._asked.append(direction)
        if len(self._asked) >= self._patience:
            if direction == -self._last_move:  # back where it came from: noise has moved it
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._last_move = direction
            self._take(solved) if solved.by_cpu else self._give_up(solved)

    def _is_no_shorter(self, solved: CpuShare) -> bool:
        """Whether steps with this share were no shorter than without, for some windows in a row.

        At first that is as steps with the device alone were timed. Later they may take longer for
        other reasons, and it is as calculated from the device's present times.
        """
        step_us = solved.sequences * _median(self._seen, lambda step: step.step_us / step.sequences)
        without_us = solved.without_us if self._proven else solved.sequences * self._alone_us
        shorter = step_us <= (1 - LEAST_GAIN) * without_us
        self._proven |= shorter
        self._slower = 0 if shorter else self._slower + 1
        return self._slower >= _STRIKES

    def _solve(self) -> CpuShare:
        self.solved = best_share(times_of(self._seen, self._around_us))
        return self.solved

    def _take(self, solved: CpuShare) -> None:
        self.fraction = solved.by_cpu / solved.sequences
        self.moves += 1
        self._enter(Phase.SHARING)

    def _give_up(self, solved: CpuShare) -> None:
        self.solved = solved
        self.fraction = 0.0
        self._enter(Phase.NONE)

    def _enter(self, phase: Phase) -> None:
        self.phase, self._asked, self._slower, self._settling = phase, [], 0, SETTLING_STEPS

    def in_words(self) -> str:
        """The share and why, in one sentence."""
        if self.phase is Phase.FIXED:
            return f"the CPU trains {self.fraction:.1%} of each batch, as cpu_share says{self._last_times()}"
        if self.phase in (Phase.ALONE, Phase.TRIAL) or self.solved is None:
            return f'cpu_share="auto": {self.phase}'
        if self.phase is Phase.NONE:
            if self.solved.by_cpu:
                return (f'cpu_share="auto": none pays. {self.solved} was calculated, and steps were not {LEAST_GAIN:.0%} shorter than the '
                        f"{time_text(self.solved.without_us)} without it")
            return f'cpu_share="auto": {self.solved}'
        return f'cpu_share="auto": {self.solved}; the share has been set {self.moves} times'

    def _last_times(self) -> str:
        shared = [step for step in self._seen if step.by_cpu]
        if not shared:
            return ""
        device, begin, cpu = (_median(shared, of) for of in (lambda s: s.device_us, lambda s: s.begin_us, lambda s: s.cpu_us))
        return (f": the device takes {time_text(device)} for its part; the CPU begins after {time_text(begin)} and takes {time_text(cpu)}")


def times_of(steps: Sequence[SharedStep], around_us: float) -> ShareTimes:
    """What these steps say of a batch of their usual size. The last one of an epoch may be small.

    around_us   of a step: with neither part at work
    """
    sequences = statistics.median_high(step.sequences for step in steps)
    return ShareTimes(
        sequences,
        device_us=sequences * _median(steps, lambda step: step.device_us / (step.sequences - step.by_cpu)),
        cpu_sequence_us=_median(steps, lambda step: step.cpu_us / max(step.by_cpu, 1)),
        begin_us=_median(steps, lambda step: step.begin_us),
        join_us=_median(steps, lambda step: step.join_us),
        around_us=around_us,
    )


def _median(steps: Sequence[SharedStep], of: Callable[[SharedStep], float]) -> float:
    return statistics.median(map(of, steps))
