"""Holds steps under a solved plan against what all states on the device would take: a plan that is slower was solved from wrong times.

    TRUSTED    steps are longer than predicted for all states on the device   -> measure: times are taken and the plan solved again
    MEASURED   and so they are under what was solved then                      -> try: all states go to the device
    TRYING     those steps are shorter                                         -> they stay there
               they are not                                                    -> back to the plan before
    SETTLED    nothing more for a while

A bounded number of moves, then: two for each `_PATIENCE` steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from enum import StrEnum

from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Placement, Plan

_SETTLING_STEPS = 3  # after a change of plan: the step that moved states, and those in its wake
_STEPS = 8  # whose median is judged
_MARGIN = 0.05  # steps that are that much longer are no noise of the prediction
_GAIN = 0.03  # that all states on the device must bring to stay there
_PATIENCE = 500  # steps after which a settled matter is looked at again


class CheckState(StrEnum):
    """How far the plan in force is believed."""

    TRUSTED = "trusted"
    MEASURED = "measured again"
    TRYING = "trying all states on the device"
    SETTLED = "settled"


class Advice(StrEnum):
    """What to do now."""

    NOTHING = "nothing"
    MEASURE = "measure"
    TRY = "try"
    BACK = "back"


class PlanCheck:
    """Watches the steps of one session.

    before    the plan that was in force before all states were tried on the device
    note      what the last advice was given for, in a sentence
    """

    def __init__(self) -> None:
        self.state = CheckState.TRUSTED
        self.before: Plan | None = None
        self.note = ""
        self._steps_us: deque[float] = deque(maxlen=_STEPS)
        self._waiting = _SETTLING_STEPS
        self._before_us = 0.0
        self._patience = 0
        self._too_hopeful = 1.0

    def restart(self) -> None:
        """Another plan is in force, or the same with other times: the steps before say nothing of it."""
        self._steps_us.clear()
        self._waiting = _SETTLING_STEPS

    def expected_us(self, plan: Plan) -> float:
        """What steps under `plan` can be expected to take: the prediction, and how much too hopeful it was of states on the host."""
        step_us = plan.predicted["step_us"]
        return step_us if plan.numel(Placement.GPU) == sum(row.numel for row in plan.rows) else step_us * self._too_hopeful

    def saw(self, step_us: float, plan: Plan, all_on_device_us: float | None) -> Advice:
        """A step under `plan` took so long; `all_on_device_us`: predicted for all states there, None where they do not fit."""
        if self._waiting:
            self._waiting -= 1
            return Advice.NOTHING
        self._steps_us.append(step_us)
        if len(self._steps_us) < _STEPS:
            return Advice.NOTHING
        median_us = statistics.median(self._steps_us)
        if self.state is CheckState.SETTLED:
            return self._trust_again()
        self.restart()
        if self.state is CheckState.TRYING:
            return self._judge_trial(median_us)
        return self._judge(median_us, plan, all_on_device_us)

    def _trust_again(self) -> Advice:
        self._patience -= 1
        if not self._patience:
            self.state = CheckState.TRUSTED
            self.restart()
        return Advice.NOTHING

    def _judge(self, median_us: float, plan: Plan, all_on_device_us: float | None) -> Advice:
        if all_on_device_us is None or median_us <= (1 + _MARGIN) * all_on_device_us:
            self.state = CheckState.TRUSTED
            return Advice.NOTHING
        self.note = f"steps took {time_text(median_us)}; all states on the device were predicted at {time_text(all_on_device_us)}"
        if self.state is CheckState.TRUSTED:
            self.state = CheckState.MEASURED
            self.note += ", so times were measured again"
            return Advice.MEASURE
        self.state = CheckState.TRYING
        self.before, self._before_us = plan, median_us
        self.note += ", also with times measured again, so that is tried"
        return Advice.TRY

    def _judge_trial(self, median_us: float) -> Advice:
        assert self.before is not None
        self.state, self._patience = CheckState.SETTLED, _PATIENCE
        self.note = f"all states on the device were tried: {time_text(median_us)} a step instead of {time_text(self._before_us)}"
        if median_us <= (1 - _GAIN) * self._before_us:
            predicted_us = self.before.predicted.get("step_us", 0.0)
            self._too_hopeful = max(self._before_us / predicted_us, 1.0) if predicted_us else 1.0
            self.note += ", so they stay there"
            return Advice.NOTHING
        self.note += ", so they went back"
        return Advice.BACK
