"""A loop in which a fault may hit any call: afterwards the step is whole, or none of it is done.

    python -m tests.cpu.fault_loop [DEVICE]        prints the table of docs/faults.md
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.errors import HytrainError, StatesError
from hytrain_fx.ir.plan import Placement

from .faults import KINDS, Faults, Place
from .loops import HYPER, Twins, plain_loop, weights
from .models import Batches, mlp
from .test_placements import plan_of
from .threads import engine_threads, threads_left

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_MOST_TIMES = 1  # a line is tried once for each call of the loop
_START = [Placement.CPU, Placement.STREAM, Placement.GPU]
_MOVES = {
    "move of states": [Placement.GPU, Placement.CPU, Placement.STREAM],
    "move of all states to the host": [Placement.CPU],
    "move back": _START,
}
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one fault did.

    error   the class of what the call raised, empty where it raised nothing
    left    "before": as if the step had not been; "after": the whole step; "load again": refused
            until states are loaded; else a defect
    """

    place: Place
    error: str
    left: str


class FaultLoop:
    """One compiled model, put back to the start for each fault.

    Its states are in all three places (on the torch engine: in two).

    options   of `hytrain_fx.compile`
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
        self._options = {"k": 0, "workers": 2, "timeout_s": 20.0, "warmup_steps": 10**6, **options}  # no plan but ours
        def make() -> tuple[torch.nn.Module, Batches]:
            model, batches = mlp()
            model.to(device, dtype)
            return model, [tuple(x.to(device, dtype if x.is_floating_point() else None) for x in batch) for batch in batches]

        self._make = make
        self._compile()

    def _compile(self) -> None:
        self.twins = Twins(self._make, **self._options)
        reference = self._restart()
        expected = []
        for _ in range(3):
            expected.append(weights(self.twins.plain))
            self._train(self.twins.plain, reference, None)
        self._other = self._checkpoint = self.twins.optimizer.state_dict()
        self.states: list[State] = []
        for _ in range(2):  # captures every graph; the second round is what counts
            self._restart()
            self.states = [self._state()]
            for _ in range(2):
                self._run(None)
                self.states.append(self._state())
                self._checkpoint, self._other = self._other, self.twins.optimizer.state_dict()
        for state, weights_of_plain in zip(self.states, expected, strict=True):
            for name, value in weights_of_plain.items():
                assert torch.equal(state[name], value), f"without a fault {name} differs from the plain loop's"

    def places(self, kind: str) -> list[Place]:
        """Every place that a fault of this kind can hit."""
        self._restart()
        self._run(None)  # graphs are captured again where torch's threads are others than before
        self._restart()
        faults = Faults(kind)
        with faults.counted() as found:
            self._run(faults)
        times: Counter[tuple[str, str]] = Counter()
        return [place for place in found if self._is_early(times, place)]

    @staticmethod
    def _is_early(times: Counter[tuple[str, str]], place: Place) -> bool:
        times[place.call, place.line] += 1
        return times[place.call, place.line] <= _MOST_TIMES

    def outcome(self, kind: str, place: Place) -> Outcome:
        """Run the loop with the fault at `place`, then go on as a user who drops the batch.

        Gives what is left.
        """
        self._restart()
        faults, error = Faults(kind), ""
        try:
            with faults.at(place):
                self._run(faults)
        except Exception as raised:  # whatever it is, it is looked at
            error = type(raised).__name__ + ("" if "injected" in str(raised) else f" that does not name its cause: {raised}")
        assert faults.raised, f"{place} was not reached again"
        try:
            left = self._left()
        except Exception as raised:
            left = f"then {type(raised).__name__}: {raised}"
        if left not in ("before", "after", "load again"):
            self.close()
            self._compile()
        return Outcome(place, error, left)

    def close(self) -> None:
        self.twins.close()

    def _left(self) -> str:
        optimizer = self.twins.optimizer
        optimizer.zero_grad()
        left = ""
        try:
            found = self._state()
        except StatesError:
            left = "load again"
            self.twins.ours.load_state_dict({name: self.states[1][name] for name in weights(self.twins.plain)})
            optimizer.load_state_dict(self._checkpoint)
            found = self._state()
        same = [step for step in (0, 1) if _same(found, self.states[step])]
        if not same:
            return f"torn: {_different(found, self.states[0])} differ from before, {_different(found, self.states[1])} from after"
        self._run(None)
        if not _same(self._state(), self.states[same[0] + 1]):
            return f"then wrong: {_different(self._state(), self.states[same[0] + 1])}"
        return left or ("before", "after")[same[0]]

    def _restart(self) -> Any:
        self.twins.optimizer.zero_grad()
        self._place(_START)
        return self.twins.restart()[0]

    def _place(self, places: list[Placement]) -> None:
        session = self.twins.session
        possible = [place for place in places if place is not Placement.STREAM or session.engine.can_stream]
        session.place(plan_of(session, possible))

    def _state(self) -> State:
        saved = self.twins.optimizer.state_dict()["state"]
        states = {f"{row}.{name}": torch.as_tensor(value).clone() for row, entry in saved.items() for name, value in entry.items()}
        return weights(self.twins.ours) | states

    def _train(self, model: Any, optimizer: Any, faults: Faults | None) -> None:
        """One step of two micro-batches, clipped, and an evaluation."""
        call = _caller(faults)
        call("zero_grad()", optimizer.zero_grad)
        for batch in self.twins.batches[:2]:
            loss = call("forward", partial(model, *batch))
            call("backward()", loss.backward)
        call("clip_grad_norm_()", lambda: clip_grad_norm_(model.parameters(), 0.05))
        call("step()", optimizer.step)
        with torch.no_grad():
            call("evaluation", lambda: model(*self.twins.batches[0]))

    def _run(self, faults: Faults | None) -> None:
        """A step, and what else a loop does with model and optimizer.

        In the end all is as before, one step further.
        """
        model, optimizer, call = self.twins.ours, self.twins.optimizer, _caller(faults)
        self._train(model, optimizer, faults)
        saved_weights = call("model.state_dict()", lambda: weights(model))
        saved = call("optimizer.state_dict()", optimizer.state_dict)
        call("optimizer.load_state_dict()", lambda: optimizer.load_state_dict(self._other))
        model.load_state_dict(saved_weights)
        call("", lambda: optimizer.load_state_dict(saved))  # after a fault in here the states would be of neither step
        for name, places in _MOVES.items():
            call(name, partial(self._place, places))
        call("explain()", lambda: str(hytrain_fx.explain(model)))


def _caller(faults: Faults | None) -> Callable[[str, Callable[[], Any]], Any]:
    def call(name: str, what: Callable[[], Any]) -> Any:
        if faults is not None:
            faults.call = name
        return what()

    return call


def _same(found: State, expected: State) -> bool:
    return not _different(found, expected)


def _different(found: State, expected: State) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n])][:4]


def assert_whole_or_undone(kind: str, loop: FaultLoop) -> None:
    """A fault of this kind leaves the step whole or undone, at every place.

    The error names its cause, no state is torn, training goes on, and docs/faults.md has the row.
    """
    places = loop.places(kind)
    assert places, "no place was found: the loop or what is watched has changed"
    outcomes = [loop.outcome(kind, place) for place in places]
    wrong = [f"{outcome.place}: {outcome.error}, {outcome.left}" for outcome in outcomes if not _is_right(outcome)]
    assert not wrong, "\n".join(wrong)
    documented = PAGE.read_text()
    for call in {outcome.place.call for outcome in outcomes}:
        assert f"| {kind} | `{call}` " in documented, f"docs/faults.md has no row for {kind} in {call}"


def _is_right(outcome: Outcome) -> bool:
    in_step = outcome.place.call in ("zero_grad()", "forward", "backward()", "clip_grad_norm_()", "step()")
    expected = ("before", "after") if outcome.place.call == "step()" else ("before",) if in_step else ("after",)
    if outcome.place.call == "optimizer.load_state_dict()":
        expected = ("after", "load again")
    if outcome.place.call.startswith("move") and not outcome.error:
        return outcome.left == "after"  # what the loop may still read of old gradients is kept where there is memory for it
    return outcome.error.endswith("Error") and outcome.left in expected


def assert_compile_undone(kind: str, engine: Any, device: str = "cpu") -> None:
    """A fault of this kind in compile() leaves a plain model, at every place.

    The error names its cause, model and optimizer stay plain, and a second try trains.
    """
    before = engine_threads()
    hytrain_fx.close(_compiled(engine, device)[0])
    faults = Faults(kind)
    with faults.counted() as found:
        made = _compiled(engine, device, faults)[0]
        faults.call = "close()"
        hytrain_fx.close(made)
    places = [place for place in dict.fromkeys(found) if place.nth < 2 and place.call == "compile()"]
    for place in places:
        model, optimizer, batches = _uncompiled(device)
        faults = Faults(kind)
        faults.call = "compile()"
        with faults.at(place), pytest.raises(Exception, match="injected") as raised:
            hytrain_fx.compile(model, optimizer, k=1, engine=engine, workers=2)
        assert isinstance(raised.value, HytrainError | torch.OutOfMemoryError), f"{place}: {raised.value!r}"
        assert all(type(p) is nn.Parameter for p in model.parameters()), place
        assert threads_left(before) == [], place
        plain_loop(1)(model, optimizer, batches)
    model, optimizer, batches = _compiled(engine, device)
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


def _uncompiled(device: str) -> tuple[Any, Any, Batches]:
    torch.manual_seed(0)
    model, batches = mlp()
    model.to(device)
    moved = [tuple(x.to(device) for x in batch) for batch in batches]
    return model, torch.optim.AdamW(model.parameters(), **HYPER), moved


def _compiled(engine: Any, device: str, faults: Faults | None = None) -> tuple[Any, Any, Batches]:
    model, optimizer, batches = _uncompiled(device)
    if faults is not None:
        faults.call = "compile()"
    _, ours = hytrain_fx.compile(model, optimizer, k=1, engine=engine, workers=2)
    return model, ours, batches


def table(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """A Markdown row for each kind of fault and call: places tried, the errors, what was left."""
    rows = ["| fault | in | places | error | what is left |", "|---|---|---|---|---|"]
    for kind, found in outcomes.items():
        calls = dict.fromkeys(outcome.place.call for outcome in found)
        for call in calls:
            of_call = [outcome for outcome in found if outcome.place.call == call]
            errors = ", ".join(sorted({f"`{outcome.error}`" if outcome.error else "none" for outcome in of_call}))
            left = ", ".join(sorted({outcome.left for outcome in of_call}))
            rows.append(f"| {kind} | `{call}` | {len(of_call)} | {errors} | {left} |")
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop = FaultLoop(torch.bfloat16, *sys.argv[1:2])
    print("\n".join(table({kind: [loop.outcome(kind, place) for place in loop.places(kind)] for kind in KINDS})))
