"""The verdict: a compiled model in at most five lines of plain words.

    size, the step, how much longer it is than forward and backward alone
    what it would take with everything on the device, and with everything on the host
    device memory that is saved
    what binds
    what to change first

Each figure says whether it is measured or predicted. What is not known yet is left out, and where
nothing is measured one sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.explain.plan.explained import THE_CPU, Explained
from hytrain_fx.explain.plan.what_helps import MOST_TOKENS, Binding, Help, tokens_to_hide
from hytrain_fx.ir.figures import bytes_text, params_text, time_text
from hytrain_fx.ir.task_graph import TaskKind

LITTLE = 0.005
"""Share of the step: what gains less is only named."""
# Share of the measured step: more time than this outside of all that the library knows is the loop.
_MUCH = 0.05
_BINDS = {"cpu": "the CPU binds", "d2h": "the link to the host binds", "h2d": "the link to the device binds",
          "host_memory": "the host's memory binds"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of the verdict; None is what is not known (yet).

    device               its name, or "the CPU"
    params               managed parameters
    step_us              measured: median wall time of the last steps
    compute_us           measured: forward and backward of these steps, without waits
    loop_us              measured: what is left of the step without these, waits and device updates,
                         of which the last is predicted
    predicted_step_us    under the plan in force
    predicted_compute_us    forward and backward that the prediction is made from
    all_on_device_us     predicted step with every state on the device, whether they fit or not
    all_on_host_us       predicted step with every update by the CPU
    all_states_bytes     states of all parameters, were they on the device
    device_states_bytes  of them, what rests there (counted)
    budget_bytes         device memory that the plan may take for states; None = no limit known
    saved_bytes          device memory that is saved, counted: states that do not rest there, less
                         the ring and the staging area
    binding              what sets the length of the step, predicted
    tokens_to_hide       times as many tokens in a step that would hide the waits, predicted; None
                         also where MOST_TOKENS times as many would not
    first_help           the change that saves most, predicted; None where none was tried
    """

    device: str
    params: int
    step_us: float | None
    compute_us: float | None
    loop_us: float | None
    predicted_step_us: float | None
    predicted_compute_us: float | None
    all_on_device_us: float | None
    all_on_host_us: float | None
    all_states_bytes: int | None
    device_states_bytes: int
    budget_bytes: int | None
    saved_bytes: int | None
    binding: Binding | None
    tokens_to_hide: float | None
    first_help: Help | None

    @property
    def above_compute_share(self) -> float | None:
        """How much longer a step is than forward and backward alone: 0.1 for 10%.

        Of the measured step, else of the predicted one.
        """
        pairs = ((self.step_us, self.compute_us), (self.predicted_step_us, self.predicted_compute_us))
        return next((max(step_us / compute_us - 1, 0.0) for step_us, compute_us in pairs if step_us and compute_us), None)

    def lines(self) -> list[str]:
        """One to five lines of at most 100 columns."""
        if self.step_us is None and self.predicted_step_us is None:
            return [f"{params_text(self.params)} parameters; no step is measured yet, so nothing is predicted either"]
        found = [self._step_line(), self._ends_line(), self._memory_line(), self.binds_line(), self.change_line()]
        return [line for line in found if line]

    def _step_line(self) -> str:
        size = f"{params_text(self.params)} parameters"
        above = "" if self.above_compute_share is None else f", {self.above_compute_share:.0%} above forward and backward alone"
        if self.step_us is not None:
            alone = f" ({time_text(self.compute_us)})" if self.compute_us else ""
            return f"{size}; {time_text(self.step_us)} a step measured{above}{alone}"
        return f"{size}; {time_text(self.predicted_step_us or 0.0)} a step (predicted, not measured){above}"

    def _ends_line(self) -> str:
        if self.predicted_step_us is None:
            return "nothing is predicted yet: the times for that are not measured"
        if self.all_on_device_us is None or self.all_on_host_us is None:
            return ""
        return (f"predicted: {time_text(self.all_on_device_us)} with all on the device{self._room()}, "
                f"{time_text(self.all_on_host_us)} with all on the host")

    def _room(self) -> str:
        if self.all_states_bytes is None:
            return ""
        states = bytes_text(self.all_states_bytes)
        if self.budget_bytes is None:
            return f" ({states} of states)"
        fits = self.all_states_bytes <= self.budget_bytes
        return f" (its {states} fit)" if fits else f" ({bytes_text(self.budget_bytes)} of {states} fit)"

    def _memory_line(self) -> str:
        if self.saved_bytes is None or self.all_states_bytes is None:
            return ""
        if self.device == THE_CPU:
            return "no device memory is saved: the device is the CPU itself"
        return (f"{bytes_text(self.saved_bytes)} saved on the device (counted): of {bytes_text(self.all_states_bytes)} of states "
                f"{bytes_text(self.device_states_bytes)} rest there")

    def binds_line(self) -> str:
        """What binds; empty where it is not known."""
        if (found := self.binding) is None:
            return ""
        cost = time_text(found.cost_us)
        if found.what == "compute":
            return f"predicted: forward and backward bind, updates add {cost} to a step"
        if found.units is None:
            return f"predicted: updates on the device bind, with {time_text(found.took_us)} of a step"
        times = self.tokens_to_hide
        hides = f"not even {MOST_TOKENS:g}x the tokens hide it" if times is None else f"{times:g}x the tokens would hide it"
        return f"predicted: {_BINDS[found.what]}, the forward waits {cost}; {hides}"

    def change_line(self) -> str:
        """What to change first; empty where nothing was tried."""
        help = self.first_help
        gain_us = help.gain_us if help else 0.0
        if self.loop_us is not None and self.step_us and self.loop_us > max(_MUCH * self.step_us, gain_us):
            return (f"look first at the loop: {time_text(self.loop_us)} of a step ({self.loop_us / self.step_us:.0%}) is no forward, "
                    "backward, wait or update")
        if help is None:
            return ""
        if help.gain_share < LITTLE:
            return f"nothing to change: each change that was tried saves less than {LITTLE:.1%} of a step (predicted)"
        return f"change first: {help.change}: saves {time_text(help.gain_us)} ({help.gain_share:.1%}, predicted)"


def verdict_of(e: Explained) -> Verdict:
    """The verdict on one compiled model."""
    m, schedule = e.measured, e.schedule
    step_us = None if m is None else m.step_us
    compute_us = None if m is None or step_us is None else m.compute_us
    ends_us = list(_ends_us(e)) if schedule else []
    binds = e.binding
    waits = binds is not None and binds.units is not None
    budget = e.plan.inputs.get("budget_bytes")
    return Verdict(
        device=e.device,
        params=sum(row.numel for row in e.plan.rows),
        step_us=step_us,
        compute_us=compute_us or None,
        loop_us=_loop_us(e),
        predicted_step_us=schedule.makespan_us if schedule else None,
        predicted_compute_us=e.profile.compute_us if e.profile and schedule else None,
        all_on_device_us=ends_us[0] if ends_us else None,
        all_on_host_us=ends_us[1] if ends_us else None,
        all_states_bytes=e.memory.estimate.all_states_bytes if e.memory.estimate else None,
        device_states_bytes=e.memory.device_states_bytes,
        budget_bytes=None if budget is None else int(budget),
        saved_bytes=_saved_bytes(e),
        binding=binds,
        tokens_to_hide=tokens_to_hide(e.profile, e.plan, e.discipline) if waits and e.profile else None,
        first_help=e.helps[0] if e.helps else None,
    )


def _ends_us(e: Explained) -> Iterator[float]:
    """The predicted step with all states on the device, and with all updates by the CPU."""
    if e.profile is None:
        return
    units = e.profile.units
    for k in (len(units), 0):
        plan = prefix_plan(units, k, source="fixed k", reason=lambda unit: "")
        yield simulate(e.profile, plan, e.discipline).makespan_us


def _loop_us(e: Explained) -> float | None:
    """What of a measured step is none of forward, backward, waits and device updates."""
    m = e.measured
    if m is None or m.step_us is None or e.step is None:
        return None
    known_us = m.compute_us + sum(m.stall_us) + (e.profile.bubble_us if e.profile else 0.0)
    device_us = sum(i.duration_us for i in e.step.schedule.intervals if i.task.kind is TaskKind.GPU_UPDATE)
    return max(m.step_us - known_us - device_us, 0.0)


def _saved_bytes(e: Explained) -> int | None:
    """What of all states does not rest on the device, less what the engine has there for them."""
    if e.memory.estimate is None:
        return None
    if e.device == THE_CPU:
        return 0
    m = e.memory
    return max(e.memory.estimate.all_states_bytes - m.device_states_bytes - m.ring_bytes - m.staging_bytes, 0)
