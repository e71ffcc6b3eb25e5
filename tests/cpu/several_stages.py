"""What each rank does in test_several_stages.py: several optimizers on a rank, weights in two."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

import hytrain_fx
from hytrain_fx.errors import NonFiniteGradientError
from hytrain_fx.session.rank_stages import stages_with

from .pipeline_loops import SPIKE, TIED, Found, Part, Pipeline, trained
from .rank_loops import Said, device_here, said_by

# ---- an optimizer that steps in every second iteration ----


def late(rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """With a GradScaler, by hand and with ours, whose states are in one place or the other.

    On a GPU torch's GradScaler has no kernel for gradients in bf16.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    kinds: list[tuple[torch.dtype, dict[str, Any]]] = [(fp32, {}), (fp32, {"gpu_states": 0.0})]
    if device_here().type == "cpu":
        kinds += [(bf16, {"gpu_states": 0.0}), (bf16, {"gpu_states": 0.5})]
    return {f"{dtype} {where}": tuple(_stepped_late(ours, dtype, where) for ours in (False, True)) for dtype, where in kinds}


def _stepped_late(ours: bool, dtype: torch.dtype, where: dict[str, Any]) -> Found:
    """Eight iterations: the rank's first optimizer steps in each, the other in every second.

    An inf is in the first stage in the third iteration, in the last stage, which steps late, in
    the fifth: its sum holds it in the sixth, too.
    """
    run = Pipeline("Interleaved1F1B", ours, dtype, scaled=True, **where)
    seen = list[float]()
    for step in range(8):
        spiked = {2: 0, 4: -1}.get(step)
        if spiked is not None:
            run.spike(SPIKE, spiked)
        seen += run.backward(step)
        if spiked is not None:
            run.spike(0.0, spiked)
        stepped = run.optimizers if step % 2 else run.optimizers[:1]
        if not ours:
            _unscale_by_hand(run, stepped)
        for optimizer in stepped:
            run.scaler.step(optimizer)
        run.scaler.update()
        for optimizer in stepped:
            optimizer.zero_grad()
        seen.append(run.scaler.get_scale())
    return {"seen": seen, "weights": run.weights()}


def _unscale_by_hand(run: Pipeline, stepped: Sequence[Any]) -> None:
    """Those that are stepped; an inf in any gradient of any stage leaves the steps out."""
    grads = [p.grad for part in run.parts for p in part.parameters() if p.grad is not None]
    worst = (~torch.stack([grad.isfinite().all() for grad in grads]).all()).float()
    distributed.all_reduce(worst, distributed.ReduceOp.MAX)
    for optimizer in stepped:
        run.scaler.unscale_(optimizer)
        for found in run.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(worst)


# ---- steps that were left out, told of at the next one, as on a GPU ----


RAISED = ("one", "each", "one again", "each again", "reversed")


def raised(rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Loops that catch the error of all steps or of each, and step again or not."""
    return {how: tuple(_caught(how, ours) for ours in (False, True)) for how in RAISED}


def _caught(how: str, ours: bool) -> Found:
    """Six iterations; the second one's gradients are not finite, which the third one tells."""
    run = Pipeline("Interleaved1F1B", ours, torch.float32, on_nonfinite="raise")
    for session in run.sessions() if ours else ():
        session.finite_steps.reads_at_once = False
    seen, again, told = list[float](), "again" in how, list[int]()
    for step in range(6):
        if step == 1:
            run.spike(SPIKE, 0)
            run.factor = 2.0**16
        losses = run.backward(step)
        seen += losses
        run.spike(0.0, 0)
        run.factor = 1.0
        optimizers = run.optimizers[:: -1 if how == "reversed" and step > 2 else 1]
        for of in ([[optimizer] for optimizer in optimizers] if "each" in how else [optimizers]):
            if ours:
                told += [step] if _stepped(of, again) else []
            elif step not in ((1,) if again else (1, 2)):
                _step_all(of)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
    assert not ours or told == [2] * (2 if how == "each" else 1), told
    return {"seen": seen, "weights": run.weights()}


def _stepped(optimizers: Sequence[Any], again: bool) -> bool:
    """Whether an error came; then all of them are stepped again, where asked."""
    try:
        _step_all(optimizers)
    except NonFiniteGradientError:
        if again:
            _step_all(optimizers)
        return True
    return False


def _step_all(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def without_gradients(at_once: bool, rank: int, size: int) -> list[str]:
    """Five steps. In the second the gradients are not finite, and one rank drops its own."""
    run = Pipeline("1F1B", True, torch.float32, on_nonfinite="raise", timeout_s=20.0)
    (session,), (optimizer,), said = run.sessions(), run.optimizers, []
    session.finite_steps.reads_at_once = at_once
    for step in range(5):
        run.spike(SPIKE if step == 1 else 0.0, 0)
        run.factor = 2.0**16 if step == 1 else 1.0
        run.backward(step)
        if step == 1 and rank == size - 1:
            optimizer.zero_grad()
        said.append(said_by(optimizer.step)[0].partition(":")[0])
        optimizer.zero_grad()
    return said


# ---- hooks on one rank alone ----


def hooked(rank: int, size: int) -> list[Said]:
    """A scaled step whose optimizer has a hook on the last rank; then on both, and an inf."""
    run = Pipeline("1F1B", True, torch.float32, scaled=True, skips=True)
    (optimizer,) = run.optimizers
    hook: Any = lambda *_: None  # noqa: E731
    said = []
    for step in range(2):
        if rank == size - 1 or step:
            optimizer.register_step_pre_hook(hook)
        if step:
            run.spike(SPIKE, 0)
        run.backward(step)
        said.append(said_by(run.end_step))
        run.scaler.update(2.0**16)
        optimizer.zero_grad()
    return said


# ---- weights that two stages have ----


def tied(rank: int, size: int) -> Found:
    """Copies whose states differ when they are tied, and when they were loaded later.

    Then they are loaded alike, trained, and closed.
    """
    run = Pipeline("1F1B", True, torch.bfloat16)
    run.backward(0)
    run.end_step()
    said = [said_by(lambda: hytrain_fx.tie_weights(run.parts, [TIED]))]
    run = Pipeline("1F1B", True, torch.bfloat16, tied=True)
    (optimizer,) = run.optimizers
    run.backward(0)
    run.end_step()
    saved = copy.deepcopy(optimizer.state_dict())
    changed = copy.deepcopy(saved)
    if rank == size - 1:  # the head comes last
        changed["state"][max(changed["state"])]["exp_avg"] += 1.0
    for states in (changed, saved):
        optimizer.load_state_dict(states)
        run.backward(1)
        said.append(said_by(run.end_step))
        optimizer.zero_grad()
    (session,) = run.sessions()
    stages = stages_with(session)
    assert stages is not None
    weight = getattr(run.parts[0], "head" if rank else "words").weight.detach().clone()
    hytrain_fx.close(run.parts[0])
    return {"said": said, "weight": weight, "kept": len(stages.ties(session)), "names": list(optimizer.sharded_state_dict()["state"])}


def summed_too_early(rank: int, size: int) -> list[Said]:
    """A tied weight whose optimizer steps in every second iteration on the last rank."""
    run = Pipeline("Interleaved1F1B", True, torch.float32, scaled=True, tied=True)
    said = []
    for step in range(2):
        run.backward(step)
        stepped = run.optimizers if step else run.optimizers[:1]
        said.append(said_by(lambda of=stepped: [run.scaler.step(optimizer) for optimizer in of]))  # type: ignore[misc]
        for optimizer in stepped if step == 0 else ():
            optimizer.zero_grad()
        if step == 0:
            run.scaler.update()
    return said


# ---- stages without graphs ----


def without_graphs(loop: str, eager: int, rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Two stages a rank; those of one rank run eagerly. By hand and with ours."""
    if rank == eager:
        setattr(Part, "forward", torch.compiler.disable(Part.forward))  # noqa: B010  # mypy: a method
    if loop == "in turn":
        return {loop: tuple(_in_turn(ours) for ours in (False, True))}
    return {loop: tuple(trained("Interleaved1F1B", loop, torch.float32, None, ours) for ours in (False, True))}


def _in_turn(ours: bool) -> Found:
    """Six iterations: the first optimizers step in one, the second ones in the next.

    An inf is in the first stage in the third, whose step is left out.
    """
    run = Pipeline("Interleaved1F1B", ours, torch.float32, skips=True)
    seen = list[float]()
    for step in range(6):
        run.spike(SPIKE if step == 2 else 0.0, 0)
        run.factor = 2.0**16 if step == 2 else 1.0
        seen += run.backward(step)
        if not ours:
            run._skip()
        run.optimizers[step % 2].step()
        for optimizer in run.optimizers:
            optimizer.zero_grad()
    return {"seen": seen, "weights": run.weights()}


def kept_by_errors(rank: int, size: int) -> list[str]:
    """Whether a schedule goes with the loop whose first step() of a rank has raised."""
    said = [_told_and_gone() for _ in range(2)]
    gc.collect()
    return [f"{'gone' if schedule() is None else 'kept'}: {type(error).__name__}" for schedule, error in said]


def _told_and_gone() -> tuple[weakref.ref[Any], Exception]:
    run = Pipeline("Interleaved1F1B", True, torch.float32, on_nonfinite="raise")
    for session in run.sessions():
        session.finite_steps.reads_at_once = False
    error: Exception | None = None
    for step in range(2):
        run.spike(SPIKE, 0)
        run.factor = 2.0**16
        run.backward(step)
        try:
            _step_all(run.optimizers[: 1 + step])  # the second one has no error of its own then
        except NonFiniteGradientError as told:
            error = NonFiniteGradientError(*told.args)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
    assert error is not None
    for part in run.parts:
        hytrain_fx.close(part)
    return weakref.ref(run.schedule), error
