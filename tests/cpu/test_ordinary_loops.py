"""Loops that users have: the bits of the same loop on a plain compiled model.

Loops about gradients alone are in test_gradient_loops.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler as lrs

import hytrain_fx
from hytrain_fx.runtime.engine import Stage

from .loops import Loop, Twins, assert_same, compare, plain_loop, weights
from .models import Batches, mlp
from .test_adamw_bits import correctly_rounded_sqrt, needs_torch_fma
from .test_schedulers import SCHEDULERS

PLACES: dict[str, dict[str, Any]] = {"host": {"k": 0}, "both": {"k": 2}, "streamed": {"k": 1, "stream": 1.0}}


@pytest.fixture(scope="module", params=PLACES)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, workers=2, timeout_s=20.0, **PLACES[request.param])
    made.agree(plain_loop(2))
    for stage in (Stage.D2H, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 500)
    yield made
    made.close()


# ---- the order of calls


ORDERS: dict[str, tuple[str, ...]] = {
    "zero first": ("zero", "forward", "backward", "step"),
    "zero between forward and backward": ("forward", "zero", "backward", "step"),
    "zero last": ("forward", "backward", "step", "zero"),
    "scheduler first": ("schedule", "zero", "forward", "backward", "step"),
    "zero twice": ("zero", "forward", "zero", "backward", "step", "zero"),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_every_order_of_calls_trains_alike(twins: Twins, order: str, set_to_none: bool) -> None:
    """Gradients may be dropped or zeroed anywhere before the backward.

    The scheduler may step at the top of the loop.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses: list[float] = []
        scheduler = lrs.ExponentialLR(optimizer, 0.8)
        loss = torch.zeros(())
        for step in range(5):
            for call in ORDERS[order]:
                if call == "zero":
                    optimizer.zero_grad(set_to_none=set_to_none)
                elif call == "forward":
                    loss = model(*batches[step % 3])
                    losses.append(float(loss.detach()))
                elif call == "backward":
                    loss.backward()
                elif call == "step":
                    optimizer.step()
                else:
                    scheduler.step()
        return losses

    twins.agree(loop)


@pytest.mark.parametrize("order", ["zero between forward and backward", "zero last"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_plan_comes_into_force_in_every_order_of_calls(order: str, set_to_none: bool) -> None:
    """Gradients that step() has used, or that are zeroed, hold no slot.

    A forward that still finds them does not put a plan off.
    """
    torch._dynamo.reset()
    made = Twins(mlp, warmup_steps=1)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(8):
            loss = model(*batches[step % 3])
            if order != "zero last":
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
            if order == "zero last":
                optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(float(loss.detach()))
        return losses

    made.agree(loop)
    assert made.session.planning.plan.source != "first steps"
    made.close()


# ---- several model calls


def test_accumulation_of_several_calls_each(twins: Twins) -> None:
    """Micro-steps whose loss has two or three model calls.

    Autograd adds the calls' gradients first, then adds the sum to `.grad`.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            for micro in range(3):
                calls = [model(*batches[(step + at) % 3]) for at in range(1 + (step + micro) % 3)]
                loss = torch.stack([(at + 1) * each for at, each in enumerate(calls)]).sum()
                loss.backward()
                losses.append(float(loss.detach()))
            losses.append(float(clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    twins.agree(loop)


def test_a_penalty_on_the_weights_by_hand(twins: Twins) -> None:
    """A term of the loss that eager code makes of the parameters, with accumulation."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            for micro in range(2):
                loss = model(*batches[(step + micro) % 3]) + 1e-2 * sum(p.square().sum() for p in model.parameters())
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    twins.agree(loop)


def test_a_target_from_a_call_without_gradients(twins: Twins) -> None:
    """A second call under no_grad between forward and backward, as in bootstrapped targets."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            loss = model(*batches[step % 3])
            with torch.no_grad():
                target = model(*batches[(step + 1) % 3])
            loss = (loss - 0.5 * target).square()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    twins.agree(loop)


class TwoHeads(nn.Module):
    """Two losses of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.one(h).square().mean(), self.other(h).abs().mean()


@pytest.mark.parametrize("k", [0, 2])
def test_losses_of_which_some_are_used(k: int) -> None:
    """Step by step the sum of two outputs, the first or the second is differentiated."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(6):
            both = model(*batches[step % 3])
            loss = (both[0] + both[1], both[0], both[1])[step % 3]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    compare(lambda: (TwoHeads(), [(torch.randn(5, 6),) for _ in range(3)]), loop, k=k)


# ---- groups, rates and freezing


def in_groups(model: Any) -> list[dict[str, Any]]:
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices[:1], "weight_decay": 0.3, "lr": 1e-2},
        {"params": matrices[1:], "weight_decay": 0.1, "betas": (0.5, 0.9)},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-4},
    ]




@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_groups_with_their_own_rates_decay_and_betas(options: dict[str, Any]) -> None:
    """Three groups, one changed and one frozen midway; a scheduler with a rate for each."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = lrs.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1.0, lambda n: 1 / (n + 1)])
        losses = []
        for step in range(9):
            if step == 3:
                optimizer.param_groups[1]["betas"] = (0.8, 0.95)
                optimizer.param_groups[0]["weight_decay"] = 0.0
            for p in optimizer.param_groups[2]["params"]:
                p.requires_grad_(step not in (4, 5))
            losses += plain_loop(1)(model, optimizer, [batches[step % 3]])
            scheduler.step()
            losses += map(float, scheduler.get_last_lr())
        return losses

    compare(mlp, loop, groups=in_groups, **options)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_freezing_with_gradients_kept_or_dropped(set_to_none: bool) -> None:
    """A layer frozen while its zeroed gradient stays goes on decaying by its moments, as in torch.

    With a gradient of None it rests.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(6):
            model.body.requires_grad_(step not in (2, 3))
            loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(float(loss.detach()))
        return losses

    compare(mlp, loop, k=2)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(set(SCHEDULERS) - {"OneCycleLR"})),
    every=st.integers(1, 3),
    skipped=st.sets(st.integers(0, 6)),
    reset=st.one_of(st.none(), st.integers(1, 5)),
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_schedulers_in_any_use(twins: Twins, name: str, every: int, skipped: set[int], reset: int | None) -> None:
    """Any scheduler, stepped now and then or made again midway, gives the plain loop's bits.

    Rates are the plain loop's too, also where some optimizer steps are skipped.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = SCHEDULERS[name](optimizer)
        found = []
        for step in range(7):
            loss = model(*batches[step % 3])
            loss.backward()
            if step not in skipped:
                optimizer.step()
            if step % every == 0:
                scheduler.step(*([float(loss.detach())] if name == "ReduceLROnPlateau" else []))
            if step == reset:
                scheduler = SCHEDULERS[name](optimizer)
            optimizer.zero_grad()
            found += [float(loss.detach()), float(optimizer.param_groups[0]["lr"])]
        return found

    twins.agree(loop)


def test_a_rate_in_a_tensor(twins: Twins) -> None:
    """lr as a 0-dim tensor that is filled in place counts with its value at step()."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        rate = torch.tensor(1e-2)
        optimizer.param_groups[0]["lr"] = rate
        losses = []
        for step in range(4):
            rate.fill_(1e-2 / (step + 1))
            losses += plain_loop(1)(model, optimizer, [batches[step % 3]])
            rate.fill_(9.0)
        return losses

    twins.agree(loop)


@needs_torch_fma
@pytest.mark.parametrize("k", [0, 2])
def test_options_in_tensors_train_as_torch_does(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 steps of AdamW with lr and betas in tensors have the bits of torch's own class.

    Its square root is correctly rounded here, as ours.
    """
    correctly_rounded_sqrt(monkeypatch)
    for betas in ((0.9, 0.999), (torch.tensor(0.9), torch.tensor(0.999))):
        found = []
        for ours in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model: Any
            model, batches = mlp()
            optimizer: Any = torch.optim.AdamW(
                model.parameters(), lr=torch.tensor(1e-3), betas=betas, weight_decay=0.1, foreach=False)
            if ours:
                _, optimizer = hytrain_fx.compile(model, optimizer, k=k)
            else:
                model.compile()
            plain_loop(16)(model, optimizer, batches)
            found.append(weights(model))
            if ours:
                hytrain_fx.close(model)
        assert_same(*found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 2])
def test_a_learning_rate_finder_leaves_no_trace(dtype: torch.dtype, k: int) -> None:
    """A sweep with growing rates, between copying and loading both state dicts, leaves no trace.

    The run after it, with a scheduler made then, is the run without it.
    """

    def make() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]

    def run(sweep: bool) -> Loop:
        def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
            plain_loop(2)(model, optimizer, batches)
            if sweep:
                saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
                finder = lrs.LambdaLR(optimizer, lambda n: 1e-3 * 4**n)
                for _ in range(4):
                    plain_loop(1)(model, optimizer, batches)
                    finder.step()
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            scheduler = lrs.ExponentialLR(optimizer, 0.9)
            found = []
            for _ in range(3):
                found += plain_loop(1)(model, optimizer, batches)
                scheduler.step()
            return [*found, *map(float, scheduler.get_last_lr()), *(float(value.double().sum()) for value in weights(model).values())]

        return loop

    assert compare(make, run(True), k=k) == compare(make, run(False), k=k)


def test_a_loaded_group_has_the_checkpoints_options_alone(twins: Twins) -> None:
    """What a scheduler puts into a group (`initial_lr`) goes with load_state_dict(), as in torch.

    The checkpoint is not shared.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        optimizer.param_groups[0]["lr"] = torch.tensor(2e-2)
        saved = optimizer.state_dict()
        optimizer.param_groups[0].update(initial_lr=9.0, lr=5.0, mine="word")
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"].fill_(1e-3)
        group = optimizer.param_groups[0]
        return ["initial_lr" in group, "mine" in group, float(group["lr"]), float(saved["param_groups"][0]["lr"])]

    twins.agree(loop)


# ---- small things that loops do


def names(model: Any) -> Any:
    return [{"params": list(model.named_parameters())[:3]}, {"params": list(model.named_parameters())[3:], "lr": 1e-3}]


def test_an_optimizer_made_of_named_parameters() -> None:
    """torch keeps the names in its groups and checkpoints; ours too."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        losses: list[Any] = plain_loop(3)(model, optimizer, batches)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        found = [group["param_names"] for group in optimizer.param_groups]
        return losses + found + plain_loop(2)(model, optimizer, batches)

    compare(mlp, loop, groups=names, k=1)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    """torch.optim.Adam(decoupled_weight_decay=True) decays as AdamW does."""
    results = []
    made: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.Adam, {"decoupled_weight_decay": True}), (torch.optim.AdamW, {}), (torch.optim.Adam, {}),
    )  # fmt: skip
    for kind, options in made:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        _, optimizer = hytrain_fx.compile(model, kind(model.parameters(), lr=1e-2, weight_decay=0.5, **options), k=1)
        results.append(plain_loop(4)(model, optimizer, batches))
        hytrain_fx.close(model)
    assert results[0] == results[1] != results[2]
