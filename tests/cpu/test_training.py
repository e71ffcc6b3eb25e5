"""Twenty steps of the ordinary loop give the same weights as torch's own optimizer.

Plan, delay and number of workers do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, Loop, Make, TorchAdam, Twins, assert_same, compare, plain_loop, weights
from .models import Batches, Mlp, gpt, mlp

pytestmark = pytest.mark.fused_kernels

STEPS = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"decoupled": False},
    "amsgrad": {"hyper": {"amsgrad": True}},
    "Adam amsgrad": {"decoupled": False, "hyper": {"amsgrad": True}},
    "maximize": {"hyper": {"maximize": True}},
    "no decay": {"hyper": {"weight_decay": 0.0}},
    "betas and eps": {"hyper": {"betas": (0.4, 0.9), "eps": 1e-3}},
}


def half(dtype: torch.dtype) -> Any:
    def make() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]

    return make


def gpt_without_qkv_bias() -> tuple[nn.Module, Batches]:
    """A key's bias has only rounding as gradient; Adam would make whole steps of that."""
    model: Any
    model, batches = gpt()
    for block in model.h:
        block.qkv.bias = None
    return model, batches


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    made = Twins(half(torch.bfloat16), workers=2)
    yield made
    made.close()


@contextmanager
def delayed(twins: Twins, delays: dict[Stage, int]) -> Iterator[None]:
    for stage, mean_us in delays.items():
        twins.session.engine.set_delay(stage, mean_us)
    yield
    for stage in delays:
        twins.session.engine.set_delay(stage, 0)


def place(twins: Twins, k: int) -> None:
    """Put a plan with `k` units on the device in force."""
    units = twins.session.planning.units()
    twins.session.place(prefix_plan(units, min(k, len(units)), source="test", reason=lambda unit: "test"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("make", [mlp, gpt_without_qkv_bias])
def test_fp32_weights_are_torch_optimizers_within_1e_6(make: Make, kind: type[torch.optim.Optimizer]) -> None:
    """After 20 steps every parameter is within 1e-6 of plain torch's.

    That is the same compiled model with torch's own optimizer.
    """
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = make()
        optimizer: Any = kind(model.parameters(), foreach=False, **HYPER)  # type: ignore[call-arg]
        if ours:
            hytrain_fx.compile(model, optimizer)
        else:
            model.compile()
        plain_loop(STEPS)(model, optimizer, batches)
        results.append(weights(model))
        if ours:
            hytrain_fx.close(model)
    for name, expected in results[0].items():
        error = (results[1][name] - expected).norm() / expected.norm()
        assert error <= 1e-6, f"{name} differs by {error}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_those_of_hand_kept_fp32_masters(dtype: torch.dtype) -> None:
    """After 20 steps every 16-bit parameter equals torch's AdamW on hand-kept fp32 masters."""
    twins = Twins(half(dtype))
    _, optimizer = twins.restart()
    reference = TorchAdam(twins.plain.parameters(), **HYPER)
    expected = plain_loop(STEPS)(twins.plain, reference, twins.batches)
    assert plain_loop(STEPS)(twins.ours, optimizer, twins.batches) == expected
    assert_same(weights(twins.ours), weights(twins.plain))
    twins.close()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("k", [0, 2])
def test_every_option_of_adam_has_the_stated_bits(name: str, k: int) -> None:
    """Each option gives the bits of the op-by-op update, states on the host or partly not."""
    compare(mlp, plain_loop(6), k=k, **OPTIONS[name])


def test_two_groups_keep_their_own_rates_and_decay() -> None:
    """Matrices with decay and vectors without, at different rates; one changes midway."""
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-2) if ours else TorchAdam(groups, lr=1e-2)
        if ours:
            hytrain_fx.compile(model, optimizer, k=1)
        else:
            model.compile()
        plain_loop(4)(model, optimizer, batches)
        optimizer.param_groups[1]["lr"] = 5e-2
        plain_loop(4)(model, optimizer, batches)
        results.append(weights(model))
        if ours:
            hytrain_fx.close(model)
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [*({"k": k} for k in range(5)), *({"planner": p, "warmup_steps": 2} for p in ("seed", "cotrain", "windowed")),
     {"warmup_steps": 1, "replan_every": 3}, {"workers": 1}, {"workers": 5}, {"ring_bytes": 70_000}],
    ids=str,
)
def test_no_plan_changes_a_bit(options: dict[str, Any]) -> None:
    """Any fixed k, any planner and any number of workers give the bits of the reference.

    So does a plan that is solved again every 3 steps.
    """
    compare(mlp, plain_loop(STEPS), **options)


def test_a_solved_plan_is_in_force_after_the_warm_up() -> None:
    """With k="auto" the first steps run by what memory allows.

    Later steps run by a plan that the named rule made from measured times.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    optimizer: Any
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), warmup_steps=2, planner="seed")
    session = session_of(model)
    assert session.planning.plan.source == "first steps"
    plain_loop(6)(model, optimizer, batches)
    assert session.planning.plan.source == "seed"
    assert session.planning.profile is not None
    assert session.planning.profile.steps >= 2
    hytrain_fx.close(model)


@pytest.mark.parametrize("stage", list(Stage), ids=lambda s: s.name)
def test_a_slow_stage_changes_no_bit(twins: Twins, stage: Stage) -> None:
    """One slow stage, rows on host and device: later forwards wait for it, and no bit changes."""
    place(twins, 2)
    with delayed(twins, {stage: 3000}):
        twins.agree(plain_loop(5))


def moving(twins: Twins, ks: list[int]) -> Loop:
    """One step under each k; the reference just steps."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for k in ks:
            if model is twins.ours:
                place(twins, k)
            losses += plain_loop(1)(model, optimizer, batches)
        return losses

    return loop


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    ks=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 1500), max_size=3),
    hyper=st.fixed_dictionaries({}, optional={
        "lr": st.sampled_from([1e-4, 0.3]),
        "weight_decay": st.sampled_from([0.0, 0.5]),
        "betas": st.sampled_from([(0.0, 0.5), (0.95, 0.999)]),
        "maximize": st.booleans(),
    }),
)
def test_moving_states_in_mid_run_changes_no_bit(
    twins: Twins, ks: list[int], delays: dict[Stage, int], hyper: dict[str, Any]
) -> None:
    """States may move between host and device before any step.

    Delays and hyper-parameters do not matter.
    """
    with delayed(twins, delays):
        twins.agree(moving(twins, ks), **hyper)


def test_every_inserted_node_runs_once_a_step_for_every_row(twins: Twins) -> None:
    """No node is dropped: each kind runs for each row in each step."""
    before = twins.session.nodes.runs.copy()
    twins.agree(plain_loop(3))
    rows = len(twins.session.table)
    ran = twins.session.nodes.runs - before
    assert ran.pop("backward_end") == 3
    assert set(ran) == {"wait", "grad_offload", "cpu_step", "gpu_step", "reload", "release"}
    assert set(ran.values()) == {3 * rows}


def test_a_model_that_is_closed_is_plain_again() -> None:
    """After close() the weights stay, and torch's own optimizer may take over.

    The model can be compiled again.
    """
    torch._dynamo.reset()
    model = Mlp()
    batches = [(torch.randn(5, 6),)]
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    plain_loop(2)(model, optimizer, batches)
    hytrain_fx.close(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    before = weights(model)
    plain_loop(1)(model, torch.optim.AdamW(model.parameters()), batches)
    assert not torch.equal(weights(model)["last.weight"], before["last.weight"])
    _, again = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    plain_loop(1)(model, again, batches)
    hytrain_fx.close(model)
