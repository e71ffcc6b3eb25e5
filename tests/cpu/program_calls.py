"""The calls that a generated program is made of.

Each does one thing to one of the two loops and returns what the loop saw. A loss is returned as it
is on the device, so that the host is ahead of it for the whole call.
"""

from __future__ import annotations

import copy
import logging
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.nn.utils import clip_grad_value_
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import hytrain_fx
from hytrain_fx.errors import HytrainError
from hytrain_fx.ir.plan import Placement

from .program_models import Side, quick_compiling
from .test_cut_parameters import cut_plan
from .test_placements import plan_of

_LIBRARY: Final = str(Path(hytrain_fx.__file__).parent)
_LOCKS: Final = "session/turns.py"  # in Python they are for tests only; the real ones have no lines
_NTH: Final = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)  # function of the library in which a signal comes


@dataclass(frozen=True)
class Kind:
    """One kind of call.

    run       does it; `at` is a drawn number that it may use as it likes
    weight    how often it is drawn, 0 = switched off (the comment says what is missing)
    refusals  documented errors with which the library may refuse it where a plain loop does it
    """

    run: Callable[[Side, int], Any]
    weight: int = 2
    refusals: tuple[type[HytrainError], ...] = ()


def _loss(side: Side, at: int) -> torch.Tensor:
    with side.setup.casting():
        return side.model(side.batches[at])  # type: ignore[no-any-return]


def _backward(side: Side, at: int) -> torch.Tensor:
    loss = _loss(side, at % 3)
    side.backward(loss)
    return loss.detach()


def _backward_other_shape(side: Side, at: int) -> torch.Tensor:
    loss = _loss(side, 3)
    side.backward(loss)
    return loss.detach()


def _forward(side: Side, at: int) -> torch.Tensor | None:
    """No forward where ours refuses the late backward and plain goes on with the new weights.

    Under autocast one 16-bit copy of a weight is read in all steps. Lion writes weights through
    `.data`, which does not change the weight's version.
    """
    if side.setup.dtype == "autocast" or side.setup.optimizer == "Lion":
        return None
    side.losses.append(_loss(side, at % 3))
    return side.losses[-1].detach()


def _late_backward(side: Side, at: int) -> None:
    if side.losses:
        side.backward(side.losses.pop())


def _scaled_backward(side: Side, at: int, infinite: bool) -> torch.Tensor:
    loss = _loss(side, at % 3)
    side.backward(side.scaler.scale(loss * (float("inf") if infinite else 1.0)))
    return loss.detach()


def _scaled_step(side: Side, at: int) -> float:
    if all(p.grad is None for p in side.parameters):
        return 0.0  # the scaler's own assertion
    if at % 2:
        side.scaler.unscale_(side.optimizer)
        if at % 4 == 1:
            side.clip_norm(0.05)
    side.scaler.step(side.optimizer)
    side.scaler.update()
    return float(side.scaler.get_scale())


def _scaled_train(side: Side, at: int, infinite: bool | None = None) -> tuple[torch.Tensor, float]:
    """One scaled step, infinite where that is said or drawn.

    Its gradients are dropped: those that are not finite would make all weights NaN in a later step.
    """
    side.optimizer.zero_grad()
    found = _scaled_backward(side, at, at == 7 if infinite is None else infinite), _scaled_step(side, at // 2)
    side.optimizer.zero_grad()
    return found


def _step(side: Side, at: int) -> None:
    side.optimizer.step()


def _train(side: Side, at: int) -> torch.Tensor:
    loss = _backward(side, at)
    side.optimizer.step()
    side.optimizer.zero_grad()
    return loss


def _closure(side: Side, at: int) -> torch.Tensor:
    def closure() -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = _loss(side, at % 3)
        side.backward(loss)
        return loss

    return side.optimizer.step(closure).detach()  # type: ignore[no-any-return]


def _clip_norm(side: Side, at: int) -> float:
    return side.clip_norm((0.02, 1e3)[at % 2])


def _clip_value(side: Side, at: int) -> None:
    clip_grad_value_(side.model.parameters(), (0.01, 1e3)[at % 2])


def _grads_to_none(side: Side, at: int) -> None:
    for p in side.parameters:
        p.grad = None


def _gradient(side: Side, at: int) -> Any:
    return side.parameters[at % len(side.parameters)].grad


def _read_grad(side: Side, at: int) -> Any:
    found = _gradient(side, at)
    return None if found is None else float(found.double().sum())


def _scale_grad(side: Side, at: int) -> None:
    if (found := _gradient(side, at)) is not None:
        found.mul_(0.5)


def _add_to_grad(side: Side, at: int) -> None:
    if (found := _gradient(side, at)) is not None:
        found.add_(1e-3)


def _drop_one_grad(side: Side, at: int) -> None:
    side.parameters[at % len(side.parameters)].grad = None


def _write_grad(side: Side, at: int) -> None:
    p = side.parameters[at % len(side.parameters)]
    p.grad = torch.full_like(p, 0.01 * (1 + at % 3))


def _evaluate(side: Side, at: int) -> torch.Tensor:
    side.model.eval()
    try:
        with torch.inference_mode() if at % 2 else torch.no_grad():
            return _loss(side, at % 3)
    finally:
        side.model.train()


def _change_group(side: Side, at: int) -> None:
    group = side.optimizer.param_groups[at % len(side.optimizer.param_groups)]
    group["lr"] = (1e-3, 3e-3, 1e-2)[at % 3]
    if side.setup.is_adam:
        group["weight_decay"] = (0.0, 0.1)[at % 2]
        group["betas"] = ((0.9, 0.999), (0.8, 0.95))[at // 2 % 2]


def _scheduler_step(side: Side, at: int) -> list[float]:
    if side.scheduler is None:
        side.scheduler = (ExponentialLR(side.optimizer, 0.7), StepLR(side.optimizer, 2, 0.3))[at % 2]
    side.scheduler.step()
    return [group["lr"] for group in side.optimizer.param_groups]


def _read_weight(side: Side, at: int) -> float:
    p = side.parameters[at % len(side.parameters)]
    return float((p.data if at % 2 else p.detach()).double().sum())


def _write_weight(side: Side, at: int) -> None:
    """Scale a weight down.

    Two writes never cancel out: otherwise only a reader between them would see that they happened.
    """
    p = side.parameters[at % len(side.parameters)]
    if at % 2 and not side.losses:  # ours counts the write: a backward whose forward came before it would be refused
        p.data.mul_(0.99)
    else:
        with torch.no_grad():
            p.mul_(0.99)


def _save(side: Side, at: int) -> None:
    weights = {name: value.detach().clone() for name, value in side.model.state_dict().items()}
    side.saved = weights, copy.deepcopy(side.optimizer.state_dict())


def _load(side: Side, at: int) -> None:
    """Both, or one of the two; 16-bit masters of a checkpoint are only of use with its weights."""
    if side.saved is not None and (at % 3 != 1 or side.setup.dtype == "bfloat16"):
        side.model.load_state_dict(side.saved[0])
    if side.saved is not None and at % 3 != 2:
        side.optimizer.load_state_dict(copy.deepcopy(side.saved[1]))


def _state_dicts(side: Side, at: int) -> float:
    side.optimizer.state_dict()
    return sum(float(value.double().sum()) for value in side.model.state_dict().values())


def _copy_model(side: Side, at: int) -> float:
    copied = copy.deepcopy(side.model)
    return sum(float(p.detach().double().sum()) for p in copied.parameters())


def _bad_forward(side: Side, at: int) -> str:
    """Torch's error depends on whether torch tries to capture the call.

    Torch logs it with its frames, and pytest would keep them, and so the session.
    """
    try:
        with patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
            side.model(side.batches[0].float() if at % 2 else "no tokens")
    except HytrainError:
        raise
    except Exception:
        return "torch's error"
    return "no error"


class Stop(KeyboardInterrupt):
    """The user's interrupt, where a program wants it."""


def _stop(*_: Any) -> None:
    raise Stop


def _interrupted_backward(side: Side, at: int) -> None:
    """Before the graph's backward."""
    loss = _loss(side, at % 3)
    loss.register_hook(_stop)
    loss.backward()


def _interrupted_step(side: Side, at: int) -> None:
    handle = (side.optimizer.register_step_pre_hook if at % 2 else side.optimizer.register_step_post_hook)(_stop)
    try:
        side.optimizer.step()
    finally:
        handle.remove()


def _place(side: Side, at: int) -> None:
    """Move states as a new plan does, which may cut parameters; there are no gradients then."""
    side.optimizer.zero_grad()
    if side.is_ours:
        session = side.session
        possible = [place for place in Placement if session.engine.can_stream or place is not Placement.STREAM]
        places = [possible[(at >> shift) % len(possible)] for shift in range(4)]
        if at % 2:
            session.place(cut_plan(session, [at, 1 + at // 3], places))
        else:
            session.place(plan_of(session, places))
    else:
        side.optimizer.state_dict()  # both look at written weights now


def _explain(side: Side, at: int) -> None:
    if side.is_ours:
        str(hytrain_fx.explain(side.model))


def _hold_alias(side: Side, at: int) -> None:
    p = side.parameters[at % len(side.parameters)]
    side.held.append((lambda: p.data, lambda: p.detach(), lambda: p.detach().view(-1),
                      lambda: next(iter(side.model.state_dict().values())))[at % 4]())


def _read_aliases(side: Side, at: int) -> list[float]:
    return [float(held.double().sum()) for held in side.held]


def _autograd_grad(side: Side, at: int) -> list[float]:
    """Gradients that go nowhere."""
    found = torch.autograd.grad(_loss(side, at % 3), side.parameters)
    return [float(g.double().sum()) for g in found]


def _part(side: Side, at: int) -> torch.Tensor:
    """The embedding called on its own: a gradient from eager code."""
    loss = side.model.embedding(side.batches[at % 3]).float().square().mean()
    side.backward(loss)
    return loss.detach()  # type: ignore[no-any-return]


def _penalty(side: Side, at: int) -> torch.Tensor:
    loss = _loss(side, at % 3) + 1e-3 * sum(p.float().square().sum() for p in side.parameters)
    side.backward(loss)
    return loss.detach()


def _close_and_compile(side: Side, at: int) -> None:
    """Close the model and compile it again, without what was held of the first compilation.

    Gradients, losses and the scheduler are dropped. Parameters frozen now would stay frozen, so all
    are unfrozen first.
    """
    _unfreeze(side, at)
    side.optimizer.zero_grad()
    side.losses, side.scheduler = [], None
    if side.is_ours:
        states = copy.deepcopy(side.optimizer.state_dict())
        side.closed.append(weakref.ref(side.session.engine))
        hytrain_fx.close(side.model)
        side.compile()
        side.optimizer.load_state_dict(states)
    else:
        side.optimizer.state_dict()  # both look at written weights now


def _train_beside(side: Side, at: int) -> torch.Tensor:
    """After a step another thread reads, saves or evaluates as often as it can.

    The first time is before the next step (docs/design.md, limits).
    """
    looks: tuple[Callable[[], object], ...] = (
        lambda: [float(p.detach().sum()) for p in side.parameters], side.optimizer.state_dict, side.model.state_dict,
        lambda: _loss_without_gradient(side, at))
    begun, ended, errors = threading.Event(), threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            with quick_compiling():  # torch keeps these settings by thread
                while not ended.is_set():
                    looks[at % len(looks)]()
                    begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=look)
    first = _train(side, at)
    if side.is_ours:
        thread.start()
        assert begun.wait(60.0)
    try:
        return first + _train(side, at)
    finally:
        ended.set()
        if side.is_ours:
            thread.join()
        if errors:
            raise errors[0]


def _loss_without_gradient(side: Side, at: int) -> float:
    with torch.no_grad():
        return float(_loss(side, at % 3))


def _fork(side: Side, at: int) -> float:
    """What a forked child reads."""
    if not side.is_ours:
        return sum_of_weights(side, at)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = repr(sum_of_weights(side, at))
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"[:4000]
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], 20.0)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError("the child has not answered in 20 s")
        told = os.read(reading, 4096).decode()
        try:
            return float(told)
        except ValueError:
            raise RuntimeError(f"in the child: {told}") from None
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def sum_of_weights(side: Side, at: int) -> float:
    """Of all weights."""
    return sum(float(p.detach().double().sum()) for p in side.parameters)


def _signalled(side: Side, at: int, call: Callable[[], object]) -> bool:
    """Make the call, with Ctrl-C at the nth library function that it enters.

    Gives whether Ctrl-C came.
    """
    left = _NTH[at % len(_NTH)]

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_LIBRARY) and not name.endswith(_LOCKS):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(count)
    try:
        # Ctrl-C in a callback of a weak reference goes no further. pytest's hook would keep it, and
        # with its frames the session, which is looked for after close.
        with patch.object(sys, "unraisablehook", sys.__unraisablehook__):
            call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    return False


def _signal_in_forward(side: Side, at: int) -> None:
    if side.is_ours:
        _signalled(side, at, lambda: _loss(side, at % 3))


def _signal_in_backward(side: Side, at: int) -> None:
    """The gradients are dropped, as only some of them may have come."""
    if side.is_ours:
        loss = _loss(side, at % 3)
        _signalled(side, at, loss.backward)
    side.optimizer.zero_grad()


def _signal_in_zero_grad(side: Side, at: int) -> None:
    if side.is_ours:
        _signalled(side, at, side.optimizer.zero_grad)
    side.optimizer.zero_grad()


def _signal_in_step(side: Side, at: int) -> None:
    """The step happens whole or not at all: the plain loop does what ours did."""
    if not side.is_ours:
        if side.said.pop("stepped"):
            side.optimizer.step()
        return
    before = _seen(side)
    interrupted = _signalled(side, at, side.optimizer.step)
    side.said["stepped"] = not interrupted or not all(map(torch.equal, before, _seen(side)))


def _seen(side: Side) -> list[torch.Tensor]:
    """What a step changes."""
    states = side.optimizer.state_dict()["state"]
    counts = [torch.as_tensor(entry["step"]) for entry in states.values() if "step" in entry]
    return [torch.tensor(len(counts)), *(_bits(p) for p in side.parameters), *counts]


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    """As whole numbers: NaN equals itself then."""
    return parameter.detach().clone().view(torch.int16 if parameter.element_size() == 2 else torch.int32)


def _signal_in_load(side: Side, at: int) -> None:
    if side.saved is not None and side.is_ours:
        _signalled(side, at, lambda: _load(side, 0))
    _load(side, 0)


def _signal_in_clip(side: Side, at: int) -> None:
    """The gradients are dropped, as only some of them may have been scaled."""
    _backward(side, at)
    if side.is_ours:
        _signalled(side, at, lambda: (_clip_norm if at % 2 else _clip_value)(side, at))
    side.optimizer.zero_grad()


def _signal_in_look(side: Side, at: int) -> None:
    """Ctrl-C in a call that changes nothing; both sides look at written weights in it."""
    looks = (_evaluate, _save, _state_dicts, _explain)
    if side.is_ours:
        saved = side.saved
        _signalled(side, at, lambda: looks[at // 2 % len(looks)](side, at))
        side.saved = saved
    side.optimizer.state_dict()


def _hold_up(side: Side, at: int) -> None:
    """What is launched next begins on the device some milliseconds later."""
    if side.is_ours:
        torch.cuda._sleep(1_500_000 * (1 + at))


def _freeze(side: Side, at: int) -> None:
    side.parameters[at % len(side.parameters)].requires_grad_(False)


def _unfreeze(side: Side, at: int) -> None:
    for p in side.parameters:
        p.requires_grad_(True)


ON_GPU: dict[str, Kind] = {"hold up the device": Kind(_hold_up, 16)}
ON_CPU = ("fork",)  # alone: a forked process may not use the device
KINDS: dict[str, Kind] = {
    "train": Kind(_train, 10),
    "backward": Kind(_backward, 8),
    "step": Kind(_step, 8),
    "zero_grad": Kind(lambda side, at: side.optimizer.zero_grad(), 5),
    "zero_grad(set_to_none=False)": Kind(lambda side, at: side.optimizer.zero_grad(set_to_none=False), 2),
    "model.zero_grad": Kind(lambda side, at: side.model.zero_grad()),
    "grads to None": Kind(_grads_to_none),
    "clip_grad_norm_": Kind(_clip_norm, 4),
    "clip_grad_value_": Kind(_clip_value),
    "forward": Kind(_forward),
    "late backward": Kind(_late_backward),
    "backward of another shape": Kind(_backward_other_shape, 1),
    "scaled step": Kind(_scaled_train, 4),
    "step with closure": Kind(_closure),
    "read grad": Kind(_read_grad),
    "scale grad": Kind(_scale_grad),
    "add to grad": Kind(_add_to_grad),
    "drop one grad": Kind(_drop_one_grad, 1),
    "write grad": Kind(_write_grad, 1),
    "evaluate": Kind(_evaluate, 4),
    "change group": Kind(_change_group),
    "scheduler.step": Kind(_scheduler_step),
    "read weight": Kind(_read_weight),
    "write weight": Kind(_write_weight),
    "save": Kind(_save),
    "load": Kind(_load),
    "state_dicts": Kind(_state_dicts),
    "copy model": Kind(_copy_model, 1),
    "bad forward": Kind(_bad_forward, 1),
    "interrupted backward": Kind(_interrupted_backward),
    "interrupted step": Kind(_interrupted_step),
    "place": Kind(_place),
    "explain": Kind(_explain, 1),
    "autograd.grad": Kind(_autograd_grad, 1),
    "part of the model": Kind(_part, 1),
    "penalty": Kind(_penalty, 1),
    "hold alias": Kind(_hold_alias),
    "read aliases": Kind(_read_aliases),
    "freeze": Kind(_freeze),
    "unfreeze": Kind(_unfreeze),
    "close and compile": Kind(_close_and_compile, 1),
    "train beside a thread": Kind(_train_beside),
    "fork": Kind(_fork, 1),
    "signal in forward": Kind(_signal_in_forward),
    "signal in backward": Kind(_signal_in_backward),
    "signal in zero_grad": Kind(_signal_in_zero_grad, 1),
    "signal in step": Kind(_signal_in_step, 4),
    "signal in load": Kind(_signal_in_load, 1),
    "signal in clip": Kind(_signal_in_clip, 1),
    "signal in look": Kind(_signal_in_look, 1),
}
