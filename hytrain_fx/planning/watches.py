"""What running steps show, and how much of it is needed before anything is done.

    FinishedStep what the session tells of a step
    StepReport   one finished step, in values
    Patience     how much more evidence is needed than at first, the same for every reason to act
    Lengths      whether steps have become longer or shorter than those that the plan in force was
                 judged by
    Promise      whether they take longer than all states on the device would

Pure: no torch, no clock, no session. `planning/controller.py` decides what follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.replan import LATEST, SHIFT, drifted, shifted
from hytrain_fx.ir.figures import time_text
from hytrain_fx.planning.agreed_trials import Agreed

PROMISE_STEPS = 8  # steps whose median is compared with the promise
REST_STEPS = 500  # steps after a trial, until the promise is doubted again
_SETTLING_STEPS = 3  # steps after a change of plan: the one that moved states, and those after it
_MARGIN = 0.05  # steps that are this much longer are no noise of the prediction
_GAIN = 0.03  # what a plan that is tried must bring to stay
_KNOWN = 8  # lengths that are remembered
_MOST_FACTOR = 64
_ON_DEVICE = "all states on the device"
_STREAMED = "streamed updates of all states on the host"


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """What the session knows of the step that has just ended.

    steps_done, steps_us    finished steps, and the lengths of the last ones, newest last
    early_updates           whether updates will begin before `step()`, or on a guess at the factors
                            that they wait for
    awaits_factors          whether they wait for clipping's or the loss scale's factor
    tries                   whether it is being found out when they had better begin
    """

    steps_done: int = 0
    steps_us: tuple[float, ...] = ()
    early_updates: bool = False
    awaits_factors: bool = False
    tries: bool = False

    def discipline(self, *, on_gpu: bool, broken: bool, runs_ahead: bool, units_ahead: int) -> Discipline:
        """How the runtime orders and gates updates, for predictions.

        broken       whether a step waits for all weights at a graph break
        runs_ahead   whether the CPU's updates end before streamed ones
        units_ahead  how many units of streamed weights are brought ahead of need

        On a GPU step() is reached early in the backward, although a norm is known at its end. A CPU
        has run the backward by then.
        """
        commits_early = on_gpu and not self.awaits_factors
        return Discipline(barrier="before_forward" if broken else "none", commit_at="backward_start" if commits_early else "backward_end",
                          early_updates=self.early_updates, early_weights=self.awaits_factors,
                          runs_ahead=commits_early and not self.early_updates and runs_ahead, units_ahead=units_ahead)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step under the plan in force.

    steps_done        finished steps, with this one
    steps_us          lengths of the last steps, newest last
    discipline        how the runtime works now
    can_measure       whether it ran captured graphs, and those before were not all cold
    complete, lost    whether enough steps are measured, and whether none of them ran captured
                      graphs
    order_known       whether the forward's order has just become known, which a given k counts in
    follows_ends      whether the streamed share follows when updates end
    ends_seen         steps that have told when their updates end, since that was last looked at
    may_look          whether there is time to look at other plans
    predicted_us      of the plan in force; None where nothing is predicted
    all_on_device_us  predicted for all states on the device; None where they do not fit, rest there
                      already, or are not compared with
    agreed            what several ranks do at this step; None: there is one
    """

    steps_done: int
    steps_us: tuple[float, ...]
    discipline: Discipline = field(default_factory=Discipline)
    can_measure: bool = True
    complete: bool = False
    lost: bool = False
    order_known: bool = False
    follows_ends: bool = False
    ends_seen: int = 0
    may_look: bool = True
    predicted_us: float | None = None
    all_on_device_us: float | None = None
    agreed: Agreed | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How much more evidence is needed than at first: `factor` times as many steps.

    It holds for every reason to act.

    It doubles after what did not pay, and starts again from 1 once the program has changed.
    """

    factor: int = 1

    def of(self, steps: int) -> int:
        """How many steps must show it, where at first `steps` were enough."""
        return self.factor * steps

    def doubled(self) -> Patience:
        """After what did not pay.

        Never so much that a lasting change is not followed at all.
        """
        return Patience(min(2 * self.factor, _MOST_FACTOR))


@dataclass(frozen=True, slots=True)
class Change:
    """Steps of another length.

    `is_new`: no such steps have been followed before; otherwise they go to and fro.
    """

    why: str
    is_new: bool


class Lengths:
    """When the lengths of steps ask for a new look at the plan.

    `window` steps are measured for that.

        at once                 when steps are 10% longer or shorter than those that the plan in
                                force was judged by
        every `every` steps     when they are by 3%
        half as long after a move, to see what it brought

    Lengths that were followed are remembered: a loop that goes to and fro between two of them needs
    patience.
    """

    def __init__(self, every: int, window: int) -> None:
        self._every = every
        self._window = window
        # count of finished steps when states moved, until that is looked at
        self._moved: int | None = None
        # count of finished steps when the plan in force was judged, and the lengths of the steps it
        # was judged by
        self._judged = 0
        self._judged_us: tuple[float, ...] = ()
        self._known_us: deque[float] = deque(maxlen=_KNOWN)
        self._off = 0  # steps in a row that were of another length

    def moved(self, report: StepReport) -> None:
        """Another plan is in force."""
        self._begin(report)
        self._moved, self._judged_us = report.steps_done, ()

    def judged(self, report: StepReport) -> None:
        """The plan in force stays, by the steps that were measured last."""
        self._begin(report)
        self._moved, self._judged, self._judged_us = None, report.steps_done, report.steps_us[-self._window :]

    def _begin(self, report: StepReport) -> None:
        self._off = 0
        if report.steps_us:
            self._know(median(report.steps_us[-self._window :]))

    def _know(self, step_us: float) -> None:
        if self._is_new(step_us):
            self._known_us.append(step_us)

    def _is_new(self, step_us: float) -> bool:
        return all(abs(step_us - known_us) > SHIFT * known_us for known_us in self._known_us)

    def look(self, report: StepReport) -> str | None:
        """Why the effect of a move is looked at now; None where it is not."""
        if self._moved is None or report.steps_done < self._moved + max(self._every // 2, 1) - self._window:
            return None
        return f"what the plan of step {self._moved} has brought is measured"

    def change(self, report: StepReport, patience: Patience) -> Change | None:
        """Steps that have changed for long enough; None where they have not."""
        before_us, latest_us = self._judged_us, report.steps_us
        if not before_us:
            return None
        at_once, small = drifted(before_us, latest_us), shifted(before_us, latest_us[-self._window :])
        self._off = self._off + 1 if at_once or small else 0
        # The look comes early enough that its window ends `every` steps after the last one.
        looks = (report.steps_done - self._judged) % max(self._every - self._window, 1) == 0
        if not (at_once or (looks and small)):
            return None
        now_us = median(latest_us[-LATEST:])
        is_new = self._is_new(now_us)
        if not is_new and self._off < patience.factor:
            return None
        self._know(now_us)
        return Change(f"steps take {time_text(now_us)}, {time_text(median(before_us))} when the plan was last looked at", is_new)


@dataclass(frozen=True, slots=True)
class Trial:
    """How the trial of a plan ended."""

    paid: bool
    why: str


class Promise:
    """Compares steps under a solved plan with what all states on the device would take.

    A slower plan was solved from wrong times.

    hope    by how much predictions for states on the host were too short, as a trial has shown
    """

    def __init__(self) -> None:
        self.hope = 1.0
        self._steps_us: deque[float] = deque(maxlen=PROMISE_STEPS)
        self._seen = 0
        self._settling = _SETTLING_STEPS
        self._rests_until = 0
        self._before_us, self._predicted_us = 0.0, 0.0
        self._what = _ON_DEVICE

    def restart(self) -> None:
        """Another plan is in force, or the same with other times.

        The steps before say nothing about it.
        """
        self._steps_us.clear()
        self._seen, self._settling = 0, _SETTLING_STEPS

    def rest(self, until: int) -> None:
        """Nothing is doubted or tried until so many steps are done."""
        self._rests_until = until

    def rests(self, report: StepReport) -> bool:
        """Whether that is still so."""
        return report.steps_done < self._rests_until

    def saw(self, report: StepReport) -> None:
        """A step has ended."""
        if self._settling or self.rests(report) or not report.steps_us:
            self._settling = max(self._settling - 1, 0)
        else:
            self._steps_us.append(report.steps_us[-1])
            self._seen += 1

    def judged(self, report: StepReport, patience: Patience) -> bool | None:
        """Whether the plan keeps its promise; None where too few steps have reported.

        A plan that does is judged again later.
        """
        if self._seen < patience.of(PROMISE_STEPS):
            return None
        self._before_us = self._median_us()
        return report.all_on_device_us is None or self._before_us <= (1 + _MARGIN) * report.all_on_device_us

    def broken_why(self, report: StepReport) -> str:
        """What was judged last, and against what."""
        assert report.all_on_device_us is not None
        took, predicted = time_text(self._before_us), time_text(report.all_on_device_us)
        return f"steps took {took}; all states on the device were predicted at {predicted}"

    def begin_trial(self, report: StepReport) -> None:
        """All states go to the device; the trial is compared with the steps judged last."""
        self._begin_trial(_ON_DEVICE, report.predicted_us or 0.0)

    def begin_stream_trial(self, report: StepReport) -> None:
        """All states on the host are streamed; the trial is compared with the last steps."""
        self._begin_trial(_STREAMED, 0.0)
        self._before_us = median(report.steps_us[-PROMISE_STEPS:])

    def _begin_trial(self, what: str, predicted_us: float) -> None:
        self._what, self._predicted_us = what, predicted_us
        self._rests_until = 0  # its own steps are judged

    def trial(self) -> Trial | None:
        """How it ended; None where too few steps have reported."""
        if self._seen < PROMISE_STEPS:
            return None
        now_us, before_us = self._median_us(), self._before_us
        why = f"{self._what} were tried: {time_text(now_us)} a step instead of {time_text(before_us)}"
        if now_us > (1 - _GAIN) * before_us:
            return Trial(False, f"{why}, so they went back")
        self.hope = max(before_us / self._predicted_us, 1.0) if self._predicted_us else 1.0
        return Trial(True, f"{why}, so they stay")

    def _median_us(self) -> float:
        found = median(self._steps_us)
        self.restart()
        return found
