"""Updates that begin before step(): right and wrong guesses give the bits of waiting.

Nothing shows before step().
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import EarlyCounts, Stage
from hytrain_fx.session import foresight
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import without_torch_function

from .loops import HandAdam, Loop, Twins, plain_loop, weights
from .models import Batches
from .test_placements import plan_of

_BEGINS_S = 0.1  # after which a test goes on though no update has begun
_WIDTH = 280  # its square is enough parameters for updates on a guess


class Wide(nn.Module):
    """Two rows that are worth a guess and three that are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.relu(self.first(x))))).float().square().mean()  # type: ignore[no-any-return]


def wide(dtype: torch.dtype) -> Callable[[], tuple[nn.Module, Batches]]:
    return lambda: (Wide().to(dtype), [(torch.randn(3, _WIDTH).to(dtype),) for _ in range(3)])


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(wide(request.param), k=0, workers=2, timeout_s=20.0, speculate=True, shadow_memory=64 << 20)
    made.session.engine.set_delay(Stage.H2D, 300)
    yield made
    made.close()


def counts(twins: Twins) -> EarlyCounts:
    return twins.session.engine.early_counts()


def masters(session: Session) -> list[torch.Tensor]:
    """Masters, or their upper halves, of the rows that are worth a guess.

    An update shows there as soon as it has run.
    """
    large = [row for row, p in enumerate(session.table.parameters) if p.numel() > 1 << 16]
    return [session.states[row].master for row in large if session.states.placement[row] is Placement.CPU]


def backward(model: Any, loss: torch.Tensor) -> None:
    """Call loss.backward(), then give updates time to begin.

    A loop that waits for the device does so too.
    """
    session = find_session(model)
    if session is None:
        loss.backward()
        return
    before = [values.clone() for values in masters(session)]
    loss.backward()
    deadline_s = time.perf_counter() + _BEGINS_S
    while time.perf_counter() < deadline_s:
        if any(not torch.equal(now, old) for now, old in zip(masters(session), before, strict=True)):
            return
        time.sleep(0.001)


def first_moment(model: Any, optimizer: Any) -> float:
    state = optimizer.state.get(model.second.weight, {})
    values = state.get("m", state.get("exp_avg"))
    return 0.0 if values is None else float(values.double().sum())


def steps(between: Callable[[Any, Any, int], Any], count: int = 6, *, waits: bool = True) -> Loop:
    """Steps with a call between backward() and step().

    Where that returns False the step is left out. `waits`: updates are given time to begin before
    the call.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = []
        for step in range(count):
            loss = model(*batches[step % 3])
            if waits:
                backward(model, loss)
            else:
                loss.backward()
            found += [loss.item(), seen := between(model, optimizer, step)]
            if seen is not False:
                optimizer.step()
            optimizer.zero_grad()
            model.first.weight.requires_grad_(True)
        return found

    return loop


def _set_lr(model: Any, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)


def _evaluate(model: Any, optimizer: Any, step: int) -> float:
    with torch.no_grad():
        return float(model(torch.ones(3, _WIDTH, dtype=model.last.weight.dtype)))


def _edit(model: Any, optimizer: Any, step: int) -> float:
    grad = (model.first if step % 2 else model.second).weight.grad
    if step % 3:
        grad.add_(1e-3)
    return float(grad.double().abs().sum())


@torch.no_grad()
def _write(model: Any, optimizer: Any, step: int) -> None:
    model.first.weight.add_(1.0 - 2 * (step % 2))
    if isinstance(optimizer, HandAdam) and optimizer.state[model.first.weight]:  # a written weight becomes the master
        optimizer.state[model.first.weight]["master"].copy_(model.first.weight)


def _drop_one(model: Any, optimizer: Any, step: int) -> None:
    model.second.weight.grad = None


def _freeze(model: Any, optimizer: Any, step: int) -> None:
    model.first.weight.requires_grad_(False)


RIGHT: dict[str, Callable[[Any, Any, int], Any]] = {
    "nothing but the loss": lambda model, optimizer, step: None,
    "norm": lambda model, optimizer, step: float(clip_grad_norm_(model.parameters(), 1e3)),
    "evaluation": _evaluate,
    "frozen, but for this step": _freeze,
}
WRONG: dict[str, Callable[[Any, Any, int], Any]] = {
    "learning rate": _set_lr,
    "left out": lambda model, optimizer, step: step % 2 == 0,
    "clipped": lambda model, optimizer, step: float(clip_grad_norm_(model.parameters(), 1e3 if step < 4 else 1e-3)),
    "gradient edited": _edit,
    "weight read": lambda model, optimizer, step: float(model.first.weight.detach().double().sum()),
    "weight written": _write,
    "state read": lambda model, optimizer, step: first_moment(model, optimizer),
    "model's state_dict": lambda model, optimizer, step: float(weights(model)["first.weight"].double().sum()),
    "gradient dropped": _drop_one,
    "gradient read": lambda model, optimizer, step: float(model.first.weight.grad.clone().double().sum()),
}


@pytest.mark.parametrize("between", RIGHT)
def test_a_right_guess_gives_the_bits_of_waiting(twins: Twins, between: str) -> None:
    """What asks for neither states nor other numbers undoes no update made before step()."""
    learned: list[EarlyCounts] = []

    def look(model: Any, optimizer: Any, step: int) -> Any:
        if step == 4:  # the engine uses each row's last factors, which are another loop's at first
            learned.append(counts(twins))
        return RIGHT[between](model, optimizer, step)

    twins.agree(steps(look, 8))
    before, after = learned[-1], counts(twins)
    assert after.commits > before.commits
    assert after.params > before.params
    assert (after.missed, after.redone) == (before.missed, before.redone)


@pytest.mark.parametrize("between", WRONG)
def test_a_wrong_guess_is_undone(twins: Twins, between: str) -> None:
    """A wrong guess is undone as though the update had not begun.

    Wrong are other numbers, a step left out, and reads and writes of what an update has changed.
    """
    before = counts(twins)
    twins.agree(steps(WRONG[between]))
    after = counts(twins)
    assert after.missed > before.missed
    assert 0 < after.redone - before.redone <= after.params - before.params


def test_parts_of_a_batch_are_added_up(twins: Twins) -> None:
    """A second backward before step() takes back what was updated with the first one's gradient."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found = []
        for step in range(5):
            for part in range(1 + step % 3):
                loss = model(*batches[(step + part) % 3])
                backward(model, loss / (1 + step % 3))
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return found

    before = counts(twins)
    twins.agree(loop)
    assert counts(twins).redone > before.redone


def test_states_run_ahead_of_step_and_weights_do_not(twins: Twins) -> None:
    """Before step() masters have changed, and the weights on the device have not.

    zero_grad() puts the masters back.
    """
    _, optimizer = twins.restart()
    model, session = twins.ours, twins.session
    backward(model, model(*twins.batches[0]))
    optimizer.step()
    optimizer.zero_grad()
    held, before = weights(model), [values.clone() for values in masters(session)]
    backward(model, model(*twins.batches[1]))
    assert any(not torch.equal(now, old) for now, old in zip(masters(session), before, strict=True))
    with without_torch_function():  # no touch
        assert all(torch.equal(p, held[name]) for name, p in zip(session.table.names, session.table.parameters, strict=True))
    optimizer.zero_grad()
    assert all(torch.equal(now, old) for now, old in zip(masters(session), before, strict=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_that_overflows_takes_its_updates_back(twins: Twins, unscale: bool) -> None:
    """Updates that began before step(), of a step that GradScaler leaves out, leave no trace."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
        found: list[Any] = []
        for step in range(8):
            loss = model(*batches[step % 3])
            backward(model, scaler.scale(loss * (float("inf") if step == 6 else 1.0)))
            if unscale:
                scaler.unscale_(optimizer)
                found.append(repr(float(clip_grad_norm_(model.parameters(), 1e3))))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.item(), scaler.get_scale()]
        return found

    before = counts(twins)
    twins.agree(loop)
    assert counts(twins).redone > before.redone


def test_a_loop_that_looks_for_infinities_itself_may_drop_them(twins: Twins) -> None:
    """Early updates with non-finite gradients are put back, every bit, where no step takes them."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found = []
        for step in range(6):
            loss = model(*batches[step % 3])
            backward(model, loss * float("inf") if step == 3 else loss)
            found.append(loss.item())
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
        return found

    twins.agree(loop)


def test_states_move_between_backward_and_step(twins: Twins) -> None:
    """zero_grad(), another placement and back: rows are moved as the last step left them."""

    def move(model: Any, optimizer: Any, step: int) -> bool:
        session = find_session(model)
        if step % 2 == 0:
            return True
        optimizer.zero_grad()
        if session is not None:
            session.place(plan_of(session, [Placement.GPU, Placement.CPU] if step == 1 else [Placement.STREAM]))
            session.place(plan_of(session, [Placement.CPU]))
        return False

    twins.agree(steps(move))


PARTS = ("backward", "backward", "evaluate", "clip", "edit", "lr", "read", "state", "zero", "drop")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(pattern=st.lists(st.tuples(st.lists(st.sampled_from(PARTS), max_size=3), st.booleans()), min_size=2, max_size=6),
       delay_us=st.sampled_from([0, 300, 3000]), stage=st.sampled_from([Stage.D2H, Stage.CPU_UPDATE, Stage.LANDING]))
def test_any_loop_keeps_its_bits(twins: Twins, pattern: list[tuple[list[str], bool]], delay_us: int, stage: Stage) -> None:
    """Whatever a loop does before step(), in any order and at any pace, its bits stay."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = []
        for step, (parts, waits) in enumerate(pattern):
            for part in ["backward", *parts]:
                found.append(do(part, model, optimizer, batches[step % 3], step))
            if waits:
                time.sleep(0.002)
            optimizer.step()
            optimizer.zero_grad()
        return found

    twins.session.engine.set_delay(stage, delay_us)
    try:
        twins.agree(loop)
    finally:
        twins.session.engine.set_delay(stage, 0)


def do(part: str, model: Any, optimizer: Any, batch: tuple[Any, ...], step: int) -> Any:
    """Do one of `PARTS`; its result is compared."""
    grad = model.first.weight.grad
    if part == "backward":
        loss = model(*batch)
        loss.backward()
        return loss.item()
    if part == "clip":
        return repr(float(clip_grad_norm_(model.parameters(), 1e-2 if step % 2 else 1e3)))
    if part == "edit" and grad is not None:
        return _edit(model, optimizer, step) if model.second.weight.grad is not None else None
    if part == "zero":
        return optimizer.zero_grad()
    of = {"evaluate": _evaluate, "lr": _set_lr, "read": WRONG["weight read"], "state": WRONG["state read"], "drop": _drop_one}
    return of[part](model, optimizer, step) if part in of else None


# ---- learning ----


@pytest.fixture(scope="module")
def learner() -> Iterator[Twins]:
    made = Twins(wide(torch.float32), k=0, workers=2, timeout_s=20.0, shadow_memory=64 << 20)
    assert not made.session.foresight.goes_ahead
    made.session.speculate("auto", runs_behind=True)
    yield made
    made.close()


def test_a_plain_loop_begins_nothing_before_step(learner: Twins) -> None:
    """Early updates gain nothing where gradients are still on their way at step().

    A GPU that runs behind the loop is such a case.
    """
    before = counts(learner)
    learner.session.engine.set_delay(Stage.LANDING, 60_000)
    learner.agree(plain_loop(8))
    learner.session.engine.set_delay(Stage.LANDING, 0)
    assert counts(learner).params == before.params
    assert 2 * counts(learner).landed_params < counts(learner).host_params
    assert not learner.session.foresight.goes_ahead


def test_a_loop_that_waits_before_step_is_learned_and_unlearned(learner: Twins) -> None:
    """After four late steps alike, updates begin before step().

    After a wrong guess it takes twice as many.
    """
    learned: list[int] = []

    def wait(model: Any, optimizer: Any, step: int) -> None:
        if step == 12:
            optimizer.param_groups[0]["lr"] = 3e-3
        if find_session(model) is not None:
            time.sleep(0.1)  # gradients arrive
            learned.append(int(learner.session.foresight.goes_ahead))
            if learner.session.foresight.goes_ahead:
                assert learner.session.planning.discipline.early_updates, "the cost model knows"

    before = counts(learner)
    learner.agree(steps(wait, 24, waits=False))
    after = counts(learner)
    assert learned[:4] == [0] * 4
    assert all(learned[5:13])
    assert learned[13:21] == [0] * 8
    assert learned[21:] == [1] * 3
    assert after.commits - before.commits >= 8
    assert after.missed - before.missed == 1


class Tried:
    """Says which way is faster without timing any."""

    why = None

    def __init__(self, early: bool) -> None:
        self.early, self.steps, self.pauses = early, 0, 0
        self.firsts: set[bool] = set()

    def try_first(self, early: bool) -> None:
        self.firsts.add(early)

    def early_workers(self, workers: int) -> int:
        return workers

    def stepped(self) -> None:
        self.steps += 1

    def pause(self) -> None:
        self.pauses += 1


class ByHalf(Tried):
    """Says that half of the workers are enough."""

    def early_workers(self, workers: int) -> int:
        return workers // 2


def test_half_of_the_workers_update_before_step(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that was found to be the fastest; all of them from step() on. No bit changes."""
    engine, before_step = twins.session.engine, list[tuple[float, float]]()
    monkeypatch.setattr(twins.session.foresight, "_contest", ByHalf(False))

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found = []
        for step in range(5):
            loss = model(*batches[step % 3])
            if find_session(model) is not None:
                hytrain_fx.settle(model)  # updates from here on are early
            begin_s = time.perf_counter()
            backward(model, loss)
            if find_session(model) is not None:
                before_step.append((1e6 * begin_s, 1e6 * time.perf_counter()))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    engine.set_delay(Stage.CPU_UPDATE, 300)
    twins.session.record(True)
    try:
        twins.agree(loop)
        updates = [record for record in engine.take_records() if record.stage is Stage.CPU_UPDATE]
    finally:
        twins.session.record(False)
        engine.set_delay(Stage.CPU_UPDATE, 0)
    early = [record for record in updates if any(begin <= record.begin_us < end for begin, end in before_step)]
    assert {record.worker for record in early} == {0}
    assert {record.workers for record in early} == {1}
    assert {record.workers for record in updates} == {1, 2}
    assert len(early) < len(updates)


def test_a_tenth_of_the_gradients_is_late(learner: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is late if a tenth of the gradients are there at step(), on average over four steps.

    Once learned, it is until half of that. A single late step is not enough. Its steps are timed,
    and updates begin before step() where that was found to be faster. Where nearly all gradients
    are there, the loop seems to wait for the device, and that is tried first. The last commit is
    said to have had these; all else of the counts is the engine's.
    """
    engine = learner.session.engine
    counted, share = engine.early_counts, 0.0
    tried, faster = Tried(True), True

    def landed() -> EarlyCounts:
        of = counted()
        return replace(of, landed_params=int(share * of.host_params), guessed_params=0)

    def ahead(*shares: float) -> list[bool]:
        """Whether updates go ahead, before each step and after the last one."""
        nonlocal tried
        tried, found = Tried(faster), []

        def land(model: Any, optimizer: Any, step: int) -> None:
            nonlocal share
            share = shares[step]
            if find_session(model) is not None:
                found.append(learner.session.foresight.goes_ahead)

        monkeypatch.setattr(foresight, "Contest", lambda halves: tried)
        learner.session.speculate("auto", runs_behind=True)  # whatever was learned before
        learner.agree(steps(land, len(shares), waits=False))
        return [*found, learner.session.foresight.goes_ahead]

    monkeypatch.setattr(engine, "early_counts", landed)
    assert not any(ahead(*[0.09] * 12))
    assert not ahead(0.0, 0.0, 0.35, 0.0, 0.0, 0.0, 0.0)[-1]
    assert tried.steps == 0
    assert ahead(*[0.2, 0.05] * 4, *[0.06] * 8, *[0.03] * 4)[8:] == [*[True] * 10, *[False] * 3]
    assert 10 <= tried.steps == 20 - tried.pauses
    faster = False
    assert not any(ahead(*[0.9] * 12))
    assert tried.steps == 12 - tried.pauses > 0
    assert tried.firsts == {False}
    ahead(*[0.98] * 12)
    assert True in tried.firsts
    monkeypatch.setattr(learner.session.planning.aside.delay, "lap_s", lambda: 0.1)
    assert not any(ahead(*[0.98] * 12)), "planning held the loop up"
    assert tried.steps == 0
    assert tried.firsts == set()


def test_a_loop_whose_factors_are_guessed_is_learned(learner: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that run on a guess at a factor need not wait for step() either.

    A loop on a GPU that clips has such factors.

    On a CPU a factor is there at step(). So the last commit is said to have had others; all else of
    the counts is the engine's.
    """
    engine = learner.session.engine
    counted = engine.early_counts

    def awaiting(guessed: bool) -> EarlyCounts:
        of = counted()
        return replace(of, landed_params=0, waiting_params=of.host_params, guessed_params=of.host_params if guessed else 0)

    def linger(model: Any, optimizer: Any, step: int) -> None:
        if find_session(model) is not None and learner.session.foresight.goes_ahead:
            time.sleep(0.1)  # workers come to it, on a busy machine too

    learner.session.speculate("auto", runs_behind=True)  # whatever was learned before
    for guessed in (False, True):
        monkeypatch.setattr(engine, "early_counts", lambda guessed=guessed: awaiting(guessed))
        begun = counted().commits
        learner.agree(steps(linger, 12, waits=False))
        assert (counted().commits > begun) == guessed
        assert learner.session.foresight.goes_ahead == guessed
        assert learner.session.foresight.awaits_factors
    monkeypatch.undo()
    learner.session.engine.set_delay(Stage.LANDING, 100_000)
    learner.agree(plain_loop(5))
    learner.session.engine.set_delay(Stage.LANDING, 0)
    assert not learner.session.foresight.will_go_ahead
    assert not learner.session.planning.discipline.early_updates
    assert not learner.session.foresight.awaits_factors


@pytest.mark.parametrize("guessed", [False, True])
def test_predictions_know_that_updates_begin_on_a_guess(learner: Twins, monkeypatch: pytest.MonkeyPatch, guessed: bool) -> None:
    """At a factor, from `step()` on: they run beside the backward as those before `step()` do."""
    engine = learner.session.engine
    counted = engine.early_counts

    def awaiting() -> EarlyCounts:
        of = counted()
        return replace(of, waiting_params=of.host_params, guessed_params=of.host_params if guessed else 0)

    monkeypatch.setattr(foresight, "Contest", lambda halves: Tried(False))
    learner.session.speculate("auto", runs_behind=True)
    monkeypatch.setattr(engine, "early_counts", awaiting)
    learner.agree(plain_loop(6))
    assert not learner.session.foresight.will_go_ahead
    assert learner.session.planning.discipline.early_weights
    assert learner.session.planning.discipline.early_updates == guessed


def test_without_speculation_nothing_is_learned() -> None:
    """Without speculation no update begins before step().

    That is with speculate=False, by default on a CPU, with shadow_memory=0, and on an engine that
    cannot.
    """
    always = {"speculate": True}
    for options in ({"speculate": False}, {"speculate": "auto"}, always | {"shadow_memory": 0}, always | {"engine": "torch"}):
        torch.manual_seed(0)
        model, batches = wide(torch.float32)()
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, workers=1, timeout_s=20.0, **options)
        for step in range(7):
            model(*batches[step % 3]).backward()
            time.sleep(0.01)
            optimizer.step()
            optimizer.zero_grad()
        hytrain_fx.explain(model)
        found = find_session(model)
        assert found is not None
        assert found.engine.early_counts().params == 0
        hytrain_fx.close(model)


def test_an_update_that_fails_before_step_is_reported() -> None:
    """A worker's error is raised at the next gate, also where no step has committed its row."""
    model, batches = wide(torch.float32)()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, workers=1, timeout_s=20.0, speculate=True)
    session = find_session(model)
    assert session is not None
    session.engine.set_delay(Stage.CPU_UPDATE, 200_000)  # it fails after the backward
    session.engine.fail_next_update(session.table.names.index("second.weight"))

    def gates() -> None:
        model(*batches[0]).backward()
        deadline_s = time.perf_counter() + 20.0
        while time.perf_counter() < deadline_s:  # its gradient lands and its update begins on other threads
            session.engine.wait([])
            time.sleep(0.001)

    with pytest.raises(EngineError, match="injected failure"):
        gates()
    optimizer.zero_grad()  # and does not hang
    with pytest.raises(EngineError, match="injected failure"):
        hytrain_fx.close(model)
