"""GradScaler without a wait: step() commits before anyone knows if gradients are finite.

Where they are not, it leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import CommitItem, Stage

from .loops import HYPER, HandAdam, Loop, Twins
from .models import Batches, mlp
from .test_placements import plan_of

SCALE = 3.0 * 2**10  # its inverse is rounded, so each product shows


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    made = Twins(mlp, workers=2, timeout_s=30.0)
    yield made
    made.close()


def scaled_loop(overflows: Sequence[bool], *, unscale: bool = False, clip: float | None = None, read: bool = False) -> Loop:
    """Steps under a loss scale, some with an infinite loss.

    Gives losses, scales, and with `read` a weight after each step.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        found = []
        for step, overflow in enumerate(overflows):
            loss = model(*batches[step % 3])
            scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [float(loss.detach()), scaler.get_scale()]
            if read:
                found.append(float(next(model.parameters()).detach().sum()))
        return found

    return loop


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=7),
    unscale=st.booleans(),
    clip=st.sampled_from([None, 0.05, 1e3]),
    read=st.booleans(),
    places=st.lists(st.sampled_from(list(Placement)), min_size=1, max_size=3),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 3000), max_size=3),
)
def test_any_pattern_of_overflows_gives_the_plain_loops_bits(
    twins: Twins, overflows: list[bool], unscale: bool, clip: float | None, read: bool, places: list[Placement], delays: dict[Stage, int]
) -> None:
    """Steps may be skipped anywhere, the first too; step counts are the plain loop's.

    This holds wherever rows are updated and whichever stage is slow.
    """
    twins.optimizer.zero_grad()
    twins.session.place(plan_of(twins.session, places))
    for stage, mean_us in delays.items():
        twins.session.engine.set_delay(stage, mean_us)
    twins.agree(scaled_loop(overflows, unscale=unscale, clip=clip, read=read))
    counted = {float(state["step"]) for state in twins.optimizer.state_dict()["state"].values()}
    assert counted == ({float(overflows.count(False))} if False in overflows else set())
    for stage in delays:
        twins.session.engine.set_delay(stage, 0)


class Reads(TorchDispatchMode):
    """The tensors that are read as Python numbers.

    They are held, so that no other tensor takes their memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("unscale", [False, True])
def test_nothing_waits_for_the_word_on_a_step(twins: Twins, unscale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler.step reads no found_inf, and nobody asks the engine before the next step."""
    asked: list[int] = []
    given_tensors: list[torch.Tensor] = []
    skipped, commit_unless, step_of = twins.session.engine.skipped, twins.session.engine.commit_unless, [0]

    def note_question() -> bool:
        asked.append(step_of[0])
        return skipped()

    def note_commit(items: Sequence[CommitItem], skip: torch.Tensor) -> None:
        given_tensors.append(skip)
        commit_unless(items, skip)

    monkeypatch.setattr(twins.session.engine, "skipped", note_question)
    monkeypatch.setattr(twins.session.engine, "commit_unless", note_commit)
    model, (_, optimizer), reads = twins.ours, twins.restart(), Reads()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    asked.clear()
    for number in range(4):
        step_of[0] = number
        scaler.scale(model(*twins.batches[0])).backward()
        with reads:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert not {t.data_ptr() for t in reads.seen} & {t.data_ptr() for t in (*found.values(), *given_tensors)}
        scaler.update()
        optimizer.zero_grad()
    assert len(given_tensors) == 4
    assert asked == [1, 2, 3]


def watched_by_a_hook(optimizer: Any, calls: list[int]) -> Callable[[], None]:
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return handle.remove  # type: ignore[no-any-return]


def watched_by_a_wrapper(optimizer: Any, calls: list[int]) -> Callable[[], None]:
    inner = optimizer.step

    def wrapper() -> None:
        calls.append(1)
        inner()

    optimizer.step = wrapper

    def put_back() -> None:
        optimizer.step = inner

    return put_back


@pytest.mark.parametrize("watch", [watched_by_a_hook, watched_by_a_wrapper])
def test_who_watches_step_sees_no_call_for_a_step_left_out(twins: Twins, watch: Callable[[Any, list[int]], Callable[[], None]]) -> None:
    """A step hook, or accelerate's wrapper around step(), is called for steps that count.

    That is what the plain loop does.
    """
    calls: list[int] = []
    seen: list[int] = []

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        stop = watch(optimizer, calls)
        found = scaled_loop([False, True, True, False])(model, optimizer, batches)
        stop()
        seen.append(len(calls))
        return found

    twins.agree(loop)
    assert seen == [2, 4]


def test_a_scheduler_is_no_watcher(twins: Twins) -> None:
    """A scheduler's mark on step() does not bring the wait back; the schedule is the plain one."""
    counts: list[int] = []

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        found = scaled_loop([False, True, False])(model, optimizer, batches)
        scheduler.step()
        found += scaled_loop([True, False])(model, optimizer, batches)
        if not isinstance(optimizer, HandAdam):
            counts.append(len(optimizer.session.builder._in_doubt))
        return found

    twins.agree(loop)
    assert counts == [len(twins.session.table)]


def test_two_steps_without_gradients_of_one_are_counted_apart(twins: Twins) -> None:
    """A parameter without a gradient in a skipped step keeps its count, as do the others."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        for step in range(4):
            scaler.scale(model(*batches[step % 3]) * (float("inf") if step in (1, 2) else 1.0)).backward()
            if step % 2:
                model.first.weight.grad = None
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [scaler.get_scale()]

    twins.agree(loop)


def test_steps_are_right_after_close_and_with_the_old_optimizer() -> None:
    """A step skipped right before close() is not counted in what is read afterwards.

    The fused optimizer, taken over, steps as ours does.
    """
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    old = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    _, optimizer = hytrain_fx.compile(model, old, k=0)
    session = session_of(model)
    scaled_loop([False, True])(model, old, batches)
    assert session.builder.steps == [1] * len(session.table)
    scaled_loop([False, True])(model, optimizer, batches)
    assert session.builder._in_doubt
    hytrain_fx.close(model)
    assert session.builder.steps == [2] * len(session.table)


def test_scaled_fp16_gradients_are_refused_as_by_torch() -> None:
    """An fp16 model under a GradScaler gives torch's ValueError.

    The optimizer can go on without the scaler.
    """
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).half()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(optimizer)
    optimizer.step()
    hytrain_fx.close(model)


def test_the_first_plan_waits_for_the_word_on_the_last_step() -> None:
    """With every state streamed no update waits; the probe on the device is its own commit."""
    made = Twins(mlp, workers=2, timeout_s=30.0)
    try:
        made.session.place(plan_of(made.session, [Placement.STREAM]))
        made.session.engine.set_delay(Stage.LANDING, 60_000)
        made.agree(scaled_loop([False] * 9))
        assert made.session.planning.profile is not None
    finally:
        made.close()


def test_an_error_before_a_forward_leaves_the_next_ones_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """When solving the first plan fails once, later steps have the reference's bits.

    The plan is solved from them.
    """
    made = Twins(mlp, workers=2, timeout_s=30.0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(made.session, "probe_device_update_us_per_param", lambda: 1 / 0)
            made.agree(scaled_loop([False] * 9))
            assert any("ZeroDivisionError" in trouble for trouble in made.session.planning.aside.troubles)
        for _ in range(3):
            made.agree(scaled_loop([False, True, False, False]))
        assert made.session.planning.profile is not None
    finally:
        made.close()
