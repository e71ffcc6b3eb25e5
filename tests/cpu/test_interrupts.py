"""Ctrl+C anywhere in a step: what follows has the bits of an interrupted plain loop.

The plain loop was interrupted before or after the same call.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hytrain_fx import errors
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.turns import CHECK_LOCKS
from hytrain_fx.weights.guard import is_guarded

from .loops import Twins, plain_loop, weights
from .models import Batches, mlp

PLANS: dict[str, dict[str, Any]] = {
    "host": {"k": 0}, "both": {"k": 2}, "streamed": {"k": 1, "stream": 1.0}, "torch": {"k": 0, "engine": "torch"},
}
CALLS = ("forward", "backward", "step", "zero")
LIBRARY = str(Path(errors.__file__).parent) + os.sep  # a clone may be in a folder of the same name, and torch in that


@pytest.fixture(scope="module", params=PLANS)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(CHECK_LOCKS)  # checked locks are lines of Python, which a signal here may break off; the real ones have none
        made = Twins(mlp, workers=2, timeout_s=20.0, **PLANS[request.param])
    made.agree(plain_loop(2))
    for stage in (Stage.D2H, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 100)
    yield made
    made.close()


@contextmanager
def signal_at(line: int, number: int = signal.SIGINT) -> Iterator[list[int]]:
    """Send a signal at the n-th line of the library that this thread runs; gives the lines run."""
    ran = [0]

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            ran[0] += 1
            if ran[0] == line:
                sys.settrace(None)
                signal.raise_signal(number)
        return local

    def tracer(frame: FrameType, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        return local if path.startswith(LIBRARY) and "runtime/interrupts.py" not in path else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield ran
    finally:
        sys.settrace(before)


Result = tuple[list[float], dict[str, torch.Tensor]]


def run(model: Any, optimizer: Any, batches: Batches, without: Callable[[str, Callable[[], Any]], bool], zeroed: bool) -> Result:
    """Five steps; `without` makes the calls of the third, and is True where one was interrupted.

    The rest of that step is then skipped.
    """
    losses = []
    for step in range(5):
        made: list[Any] = []
        calls = {
            "forward": lambda step=step, made=made: made.append(model(*batches[step % 3])),
            "backward": lambda made=made: made[0].backward(),
            "step": optimizer.step,
            "zero": optimizer.zero_grad,
        }
        for name in CALLS:
            if step != 2:
                calls[name]()
            elif without(name, calls[name]):
                if zeroed:
                    optimizer.zero_grad()
                break
        losses += [float(loss.detach()) for loss in made]
    return losses, weights(model)


def same(found: Result, expected: Result) -> bool:
    return found[0] == expected[0] and all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.sample(12)
@pytest.mark.parametrize("zeroed", [True, False], ids=["zero_grad() follows", "gradients stay"])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupted_call_happens_whole_or_not_at_all(twins: Twins, call: str, zeroed: bool) -> None:
    """SIGINT at lines all over each call changes no bits.

    A forward that was broken off may count as one that has not happened.
    """
    require_whole(twins, call, zeroed, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD], ids=str)
def test_any_signal_whose_handler_raises_leaves_steps_whole(twins: Twins, number: int) -> None:
    """As a scheduler's end, a time limit, or a loader's process that died."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, ended)
    try:
        require_whole(twins, "step", True, number)
        assert signal.getsignal(number) is ended
    finally:
        signal.signal(number, before)


def require_whole(twins: Twins, call: str, zeroed: bool, number: int) -> None:

    def left_out(when: str) -> Callable[[str, Callable[[], Any]], bool]:
        def without(name: str, make: Callable[[], Any]) -> bool:
            if name != call:
                make()
                return False
            if when == "after":
                make()
            return True

        return without

    expected = []
    for when in ("before", "after"):
        reference, _ = twins.restart()
        expected.append(run(twins.plain, reference, twins.batches, left_out(when), zeroed))
    line, seen = 1, 0
    while True:
        interrupted = [False]

        def without(name: str, make: Callable[[], Any], line: int = line, interrupted: list[bool] = interrupted) -> bool:
            if name != call:
                make()
                return False
            try:
                with signal_at(line, number):
                    make()
            except KeyboardInterrupt:
                interrupted[0] = True
            return interrupted[0]

        _, optimizer = twins.restart()
        found = run(twins.ours, optimizer, twins.batches, without, zeroed)
        if not interrupted[0]:
            break
        assert any(same(found, one) for one in expected), f"line {line} of {call}"
        line, seen = line + 1 + line // 4, seen + 1
    assert seen > 3


def test_a_forward_that_is_broken_off_as_it_begins_leaves_torch_functions_on(twins: Twins) -> None:
    """Guards are torch functions: without them eager code would read weights in flight."""
    twins.restart()
    weight = next(twins.ours.parameters())
    for line in range(1, 60):
        twins.session.plain.guard()
        with suppress(KeyboardInterrupt), signal_at(line):
            twins.ours(*twins.batches[0])
        assert is_guarded(weight), f"line {line}"
        weight.sum()
        assert not is_guarded(weight), f"line {line}"


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_weights_are_guarded_after_a_call_that_was_broken_off_as_it_began(
    twins: Twins, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are plain while compiled code runs.

    An interrupt or error at its begin leaves none that is read old later.
    """
    _, optimizer = twins.restart()
    plain, batch = twins.session.plain, twins.batches[0]
    begin = plain.begin
    loss = twins.ours(*batch)

    def broken_off(*of: Sequence[torch.Tensor]) -> None:
        begin(*of)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(plain, "begin", broken_off)
    with pytest.raises(KeyboardInterrupt):
        loss.backward() if call == "backward" else twins.ours(*batch)
    monkeypatch.undo()
    optimizer.zero_grad()
    for _ in range(2):
        twins.ours(*batch).backward()
        assert all(map(is_guarded, twins.ours.parameters()))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_backward_broken_off_while_it_adds_says_so_until_zero_grad(twins: Twins, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-added sums of micro-batches cannot be had back: reading them and step() are errors.

    After that the training goes on, bit for bit.
    """
    nodes, calls = twins.session.nodes, [0]
    offload_and_step = nodes.offload_and_step

    def interrupted(rows: Any, grads: Any) -> None:
        calls[0] += 1
        offload_and_step(rows, grads)
        if calls[0] == at:
            raise KeyboardInterrupt

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        model(*batches[0]).backward()
        if model is twins.ours:
            loss = model(*batches[1])
            with monkeypatch.context() as patched:
                patched.setattr(nodes, "offload_and_step", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    loss.backward()
            with pytest.raises(errors.GradientConsumedError, match="interrupted"):
                optimizer.step()
        optimizer.zero_grad()
        return losses + plain_loop(3)(model, optimizer, batches)

    twins.agree(loop)


def test_a_handler_of_the_users_is_called_once_and_stays(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in step() reaches the user's own handler after step(), even one that does not raise.

    Other handlers stay as they were.
    """
    _, optimizer = twins.restart()
    called = []

    def noting(number: int, frame: FrameType | None) -> None:
        called.append(twins.session.steps_done)

    build = twins.session.builder.build

    def signalled(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return build(*args)

    before = signal.signal(signal.SIGINT, noting)
    try:
        twins.ours(*twins.batches[0]).backward()
        steps = twins.session.steps_done
        monkeypatch.setattr(twins.session.builder, "build", signalled)
        optimizer.step()
        assert called == [steps + 1]
        assert signal.getsignal(signal.SIGINT) is noting
        optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_that_come_together_are_all_handled() -> None:
    """After what was whole, though each handler raises; then all handlers are back."""
    numbers, called = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM), list[int]()

    def raising(number: int, frame: FrameType | None) -> None:
        called.append(number)
        raise TimeoutError(signal.strsignal(number))

    def several() -> None:
        for _ in range(2):
            for number in numbers:
                signal.raise_signal(number)
        assert not called

    before = [signal.signal(number, raising) for number in numbers]
    try:
        for wholly in (whole()(several), lambda: whole_block(several)):
            called.clear()
            with pytest.raises(TimeoutError):
                wholly()
            assert sorted(called) == sorted(numbers)
            assert all(signal.getsignal(number) is raising for number in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def whole_block(run: Callable[[], None]) -> None:
    with whole():
        run()
