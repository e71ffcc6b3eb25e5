"""A second thread that reads, saves, evaluates or forks changes no bit of the training.

The first thread keeps the bits of the plain loop.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hytrain_fx
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.turns import make_locks
from hytrain_fx.torch_private.modules import compiled_call

from .loops import HandAdam

STEPS = 40
Look = Callable[[nn.Module, torch.optim.Optimizer], object]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)])


def _data() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 96) for _ in range(5)]


def _steps(model: Any, optimizer: torch.optim.Optimizer, *, evaluates: bool = False, delayed: bool = False) -> list[float]:
    device = next(model.parameters()).device
    losses, data = [], [batch.to(device) for batch in _data()]
    for step in range(STEPS):
        if delayed and step == 8:
            session = find_session(model)
            assert session is not None
            for stage in (Stage.CPU_UPDATE, Stage.H2D, Stage.D2H):
                session.engine.set_delay(stage, 700.0)
        loss = ((model(data[step % 5]) - 1) ** 2).mean()
        loss.backward()
        if evaluates:
            with torch.no_grad():
                losses.append(model(data[(step + 1) % 5]).sum().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _plain_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return HandAdam(net.parameters(), lr=1e-2)


def _compile(net: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return hytrain_fx.compile(net, _adamw(net), **({"k": 0, "workers": 1, "timeout_s": 20.0, "replan_every": 0} | options))


def _weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def _require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class Beside:
    """A thread that looks at a training model again and again."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._ended = threading.Event()
        self.looks = 0
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beside:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads change in the middle of anything
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._switch_s)
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except BaseException as error:
                self.errors.append(error)
                return
            self.looks += 1
            time.sleep(0.001)


def _read(model: nn.Module, _: torch.optim.Optimizer) -> object:
    return [float(p.detach().sum()) for p in model.parameters()]


def _norms(model: nn.Module, _: torch.optim.Optimizer) -> object:
    with torch.no_grad():  # else plain torch 2.13 may lock up: docs/limits.md
        return nn.utils.parameters_to_vector(model.parameters()).norm().item()


def _weights_saved(model: nn.Module, _: torch.optim.Optimizer) -> object:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _saved(_: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return optimizer.state_dict()


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return [optimizer.state[p].get("exp_avg") for p in model.parameters()]


def _copied(model: nn.Module, _: torch.optim.Optimizer) -> object:
    return copy.deepcopy(next(model.parameters()))


def _evaluated(model: nn.Module, _: torch.optim.Optimizer) -> object:
    with torch.no_grad():
        assert torch.isfinite(model(torch.ones(8, 96, device=next(model.parameters()).device))).all()
    return None


def _explained(model: nn.Module, _: torch.optim.Optimizer) -> object:
    return str(hytrain_fx.explain(model)), hytrain_fx.inspect(model).counts()


def _forked(*_: object) -> object:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)


LOOKS: dict[str, Look] = {
    "reads": _read, "norms": _norms, "weights saved": _weights_saved, "states saved": _saved, "moments": _moments, "copied": _copied,
    "evaluated": _evaluated, "explained": _explained, "forks": _forked,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("look", LOOKS)
def test_training_beside_another_thread_has_the_bits_of_the_plain_loop(look: str, engine: str) -> None:
    """Whatever the thread asks for, as often as it likes, without an error in either of them."""
    assert_exact_beside(LOOKS[look], engine)


def assert_exact_beside(look: Look, engine: str, device: str = "cpu") -> None:
    """Train, with delays, while another thread looks: losses and weights are the plain loop's.

    There is no error in either thread.
    """
    plain = _net().to(device)
    expected = _steps(torch.compile(plain), _plain_adamw(plain))
    net = _net().to(device)
    model, optimizer = _compile(net, engine=engine)
    with Beside(lambda: look(model, optimizer)) as beside:
        losses = _steps(model, optimizer, delayed=True)
    assert beside.errors == []
    assert beside.looks > 0
    assert losses == expected
    hytrain_fx.close(model)
    _require_same(_weights(net), _weights(plain))


def test_an_evaluation_waits_while_a_backward_compiles() -> None:
    """Torch refuses a compiled call while another thread traces, so the evaluation waits.

    It begins before the first backward has been compiled.
    """
    for _ in range(3):
        torch._dynamo.reset()
        model, optimizer = _compile(_net())
        losses = model(_data()[0]).square().mean(), model(_data()[0][:3]).square().mean()
        with Beside(lambda: _evaluated(model, optimizer)) as beside:  # noqa: B023
            for loss in losses:
                loss.backward()
        assert beside.errors == []
        hytrain_fx.close(model)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_an_evaluation_between_backward_and_step_reads_the_old_weights(speculate: bool, k: int) -> None:
    """Also where updates begin before the step."""
    plain = _net()
    expected = _steps(torch.compile(plain), _plain_adamw(plain), evaluates=True)
    net = _net()
    model, optimizer = _compile(net, engine="native", speculate=speculate, k=k)
    assert _steps(model, optimizer, evaluates=True, delayed=True) == expected
    hytrain_fx.close(model)
    _require_same(_weights(net), _weights(plain))


def test_states_saved_by_another_thread_are_those_of_one_step() -> None:
    """Each saved state has one count of steps, and the plain loop's moments at that count."""
    plain, seen = _net(), dict[float, list[Tensor]]()
    plain_optimizer = _plain_adamw(plain)
    compiled, data = torch.compile(plain), _data()
    for step in range(STEPS):
        ((compiled(data[step % 5]) - 1) ** 2).mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        seen[step + 1.0] = [plain_optimizer.state[p]["m"].clone() for p in plain.parameters()]
    model, optimizer = _compile(_net(), engine="native", speculate=True)
    saved: list[dict[str, Any]] = []
    with Beside(lambda: saved.append(optimizer.state_dict())) as beside:
        _steps(model, optimizer, delayed=True)
    assert beside.errors == []
    counts = [{float(entry["step"]) for entry in each["state"].values()} for each in saved if each["state"]]
    assert counts
    for each, count in zip([each for each in saved if each["state"]], counts, strict=True):
        assert len(count) == 1
        _require_same([entry["exp_avg"] for entry in each["state"].values()], seen[count.pop()])
    hytrain_fx.close(model)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_an_evaluation_in_another_thread_sees_the_weights_of_one_step(engine: str) -> None:
    """Whole: each of its outputs is one that the plain loop has between two steps."""
    assert_evaluations_whole(engine)


def assert_evaluations_whole(engine: str, device: str = "cpu") -> None:
    """Each output of an evaluation in another thread has the plain model's bits at some step."""
    plain, probe = _net().to(device), torch.ones(8, 96, device=device)
    plain_optimizer, compiled, data = _plain_adamw(plain), torch.compile(plain), [batch.to(device) for batch in _data()]
    expected = []
    for step in range(STEPS + 1):
        with torch.no_grad():
            expected.append(compiled(probe).cpu())
        ((compiled(data[step % 5]) - 1) ** 2).mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    model, optimizer = _compile(_net().to(device), engine=engine)
    seen: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            seen.append(model(probe).cpu())

    with Beside(evaluate) as beside:
        _steps(model, optimizer, delayed=True)
    assert beside.errors == []
    assert seen
    for output in seen:
        assert any(torch.equal(output, each) for each in expected)
    hytrain_fx.close(model)


@pytest.mark.parametrize("stays", [False, True])
def test_a_loader_with_workers_beside_threads_that_evaluate_save_and_explain(stays: bool) -> None:
    """Workers are forked at any time, and those that stay are forked once."""
    def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        loader = DataLoader(TensorDataset(torch.stack(_data()).flatten(0, 1)), batch_size=8, num_workers=1, persistent_workers=stays)
        for _ in range(4):
            for (batch,) in loader:
                loss = ((model(batch) - 1) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    plain = _net()
    expected = train(torch.compile(plain), _plain_adamw(plain))
    model, optimizer = _compile(_net(), engine="native")
    with ExitStack() as stack:
        looks = (_saved, _evaluated, _explained, _norms)
        threads = [stack.enter_context(Beside(partial(look, model, optimizer))) for look in looks]
        assert train(model, optimizer) == expected
    assert [beside.errors for beside in threads] == [[], [], [], []]
    hytrain_fx.close(model)


def test_a_thread_that_evaluates_may_go_on_while_the_model_is_closed() -> None:
    """close() waits for the compiled call; calls after it are those of the plain model."""
    for _ in range(5):
        model, optimizer = _compile(_net(), engine="native")
        with Beside(partial(_evaluated, model, optimizer)) as beside:
            ((model(_data()[0]) - 1) ** 2).mean().backward()
            optimizer.step()
            while beside.looks < 20 and not beside.errors:
                time.sleep(0.001)
            hytrain_fx.close(model)
            looks = beside.looks
            while beside.looks < looks + 20 and not beside.errors:
                time.sleep(0.001)
        assert beside.errors == []


def test_close_comes_after_a_call_that_another_thread_is_in() -> None:
    """close() would take the engine away from such a call."""
    model, _ = _compile(_net(), engine="native")
    session = find_session(model)
    assert session is not None
    closing = threading.Thread(target=hytrain_fx.close, args=(model,))
    with session.turns.calls:
        closing.start()
        closing.join(0.2)
        assert not session.closed
    closing.join(60)
    assert session.closed


def test_a_call_that_comes_while_the_model_is_closed_is_one_of_the_plain_model() -> None:
    """A thread may have found the compiled call before close() and made it after."""
    net = _net()
    model, _ = _compile(net, engine="native")
    call = compiled_call(model)
    assert call is not None
    hytrain_fx.close(model)
    assert torch.equal(call(_data()[0]), net(_data()[0]))


def test_an_evaluation_in_another_thread_takes_no_marks_from_a_backward() -> None:
    """A step that it overlaps is still measured."""
    model, optimizer = _compile(_net(), engine="native")
    session = find_session(model)
    assert session is not None
    _steps(model, optimizer)
    entered, done = threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad(), session.turns.calls:
            session.enter_forward()
            entered.set()
            done.wait(60)
            session.leave_forward()

    loss = ((model(_data()[0]) - 1) ** 2).mean()
    thread = threading.Thread(target=evaluate)
    thread.start()
    entered.wait(60)
    loss.backward()
    done.set()
    thread.join(60)
    optimizer.step()
    assert session.marks.captured
    hytrain_fx.close(model)


def test_locks_taken_in_another_order_are_an_error() -> None:
    """Who has `state` may take it again, and not `calls`; who has `calls` may take both."""
    locks = make_locks()
    with locks["calls"], locks["state"], locks["state"], locks["calls"]:
        pass
    for first, second in (("calls", "compiles"), ("calls", "state"), ("compiles", "state")):
        with locks[second], pytest.raises(EngineError, match=rf"'{first}' is taken while .'{second}'. is held"):
            locks[first].acquire()
    with locks["calls"]:  # nothing is left of it
        pass


def test_eager_code_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag of the process says so. It is not taken for this thread's, and no read is missed."""
    losses = []
    for ours in (False, True):
        torch._dynamo.reset()
        model: Any = _net()
        model.forward = torch.compiler.disable(model.forward)
        model, optimizer = _compile(model) if ours else (model, _plain_adamw(model))
        if (session := find_session(model)) is not None:
            session.engine.set_delay(Stage.CPU_UPDATE, 2000.0)
        found = []
        for batch in 3 * _data():
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "_is_compiling_flag", True)
                loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    hytrain_fx.close(model)
