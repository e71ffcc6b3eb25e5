"""Moments in bf16, rounded by chance: one arithmetic for every kernel, plan, cut and checkpoint.

The reference is `HandAdam` with `moments="bf16"`, in plain torch operations (loops.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import LION
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.lion import LionScalars
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.rounding import RoundingPlace, parameter_key, random_bits, rounded, rounding_key
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.split_master import split, whole_states

from .adamw_operands import GROUP, KINDS, VARIANTS, Operands, assert_same_bits, different_bits, kernel_, op_by_op_, operands
from .adamw_rows import row_of
from .engine_loop import NARROW
from .loops import HYPER, HandAdam, Twins, assert_same, gpt_in, rounded_by_chance, weights
from .models import Batches
from .saved import start
from .test_cuda_kernel_on_cpu import KERNELS as CUDA_KERNELS
from .test_cuda_kernel_on_cpu import Run, run_rows
from .test_cut_parameters import CUTS, cut_plan
from .test_split_master import split_kernel_

__all__ = ["run_rows"]  # the fixture, for this file too

CPU = torch.device("cpu")
BF16: dict[str, Any] = {"moments": "bf16"}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
PLACES_IN_MODEL = st.builds(RoundingPlace, st.integers(0, 2**32 - 1), st.sampled_from([0, 5, 2**32 - 70, 2**33 + 1]))


def scalars_of(step: int = 3, torch_cuda: bool = False, factors: tuple[float, ...] = (0.3,)) -> AdamScalars:
    return AdamScalars.of({**GROUP, **BF16}, step, decoupled=True, torch_cuda=torch_cuda, factors=factors)


def narrow(n: int, seed: int, kind: str, dtype: torch.dtype, place: RoundingPlace) -> Operands:
    """Operands with moments in bf16."""
    o = operands(n, seed, kind, dtype, None if dtype == torch.float32 else dtype)
    return replace(o, vmax=None, place=place).narrow()


# ---- rounding ----


@settings(deadline=None, max_examples=200)
@given(value=st.floats(width=32), place=PLACES_IN_MODEL, key=st.integers(0, 2**32 - 1), number=st.sampled_from([0, 1]))
def test_a_value_becomes_a_neighbour(value: float, place: RoundingPlace, key: int, number: int) -> None:
    """One of the two bf16 numbers beside it; itself where it is one; NaN stays NaN."""
    values = torch.full((40,), value)
    found = rounded(values, place, key, number)
    if torch.isnan(values).any():
        assert found.isnan().all()
        return
    below = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = values if below[0] == value else ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    assert ((found.float() == below) | (found.float() == above)).all()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("over", ["elements", "steps"])
def test_the_mean_of_rounded_values_is_the_value(over: str, number: int) -> None:
    """Over elements in one step, and over steps of one element, within four standard errors.

    Rounding to nearest would be off by 0.3 of the last bit here.
    """
    count, last_bit = 1 << 16, 2.0**-7
    value = 1.0 + 0.3 * last_bit
    place = RoundingPlace(parameter_key(3), 10_000)
    if over == "elements":
        found = rounded(torch.full((count,), value), place, rounding_key(BF16, 17), number)
    else:
        keys = torch.tensor([rounding_key(BF16, step) for step in range(1, count + 1)])
        bits = torch.tensor([int(random_bits(place.first, int(key) ^ place.key)) for key in keys])
        chance = bits >> (0 if number == 0 else 16) & 0xFFFF
        found = rounded_by_chance(torch.full((count,), value), chance)
    error = (found.double().mean() - value).abs() / last_bit
    assert error < 4 * (0.3 * 0.7 / count) ** 0.5


def test_the_chances_of_two_states_steps_and_parameters_are_apart() -> None:
    """No pair of them agrees more often than chance has it: 16 bits are uncorrelated."""
    elements, count = torch.arange(1 << 16), 1 << 16
    keys = [rounding_key(BF16, 1) ^ parameter_key(0), rounding_key(BF16, 2) ^ parameter_key(0), rounding_key(BF16, 1) ^ parameter_key(1),
            rounding_key({**BF16, "moments_seed": 1}, 1) ^ parameter_key(0)]
    bits = [random_bits(elements, key) for key in keys]
    streams = [half.double() for of in bits for half in (of & 0xFFFF, of >> 16)]
    streams.append((bits[0].roll(1) & 0xFFFF).double())
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlations.abs().max() < 5 / count**0.5
    assert len(set(keys)) == len(keys)


def test_a_second_moment_does_not_stand_still() -> None:
    """At beta2 = 0.999 and gradients of 1, exp_avg_sq comes within 1 % of 1, in the mean.

    Rounded to nearest it stops where a step is worth less than half of the last bit.
    """
    chance, nearest = torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    for step in range(1, 6001):
        chance = rounded(chance.float() * 0.999 + 0.001, RoundingPlace(parameter_key(0)), rounding_key(BF16, step), 1)
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    assert abs(chance.float().mean().item() - (1 - 0.999**6000)) < 0.01
    assert nearest.item() < 0.8


# ---- kernels ----


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 400), cut=st.integers(0, 400), seed=st.integers(0, 1 << 30), kind=st.sampled_from(KINDS), dtype=DTYPES,
       place=PLACES_IN_MODEL, torch_cuda=st.booleans())
def test_the_kernel_has_the_bits_of_torch_operations(
    n: int, cut: int, seed: int, kind: str, dtype: torch.dtype, place: RoundingPlace, torch_cuda: bool
) -> None:
    """In one piece or in two, whose second part knows where it is."""
    found = narrow(n, seed, kind, dtype, place)
    expected, scalars, at = found.clone(), scalars_of(torch_cuda=torch_cuda), min(cut, n)
    for begin, end in ((0, at), (at, n)):
        kernel_(found.cut(begin, end), scalars)
    op_by_op_(expected, scalars)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_instruction_set_rounds_alike(variant: str) -> None:
    """Vectors of any width, and none."""
    flags = (*(flag for flag in build.FLAGS if flag != "-march=native"), *VARIANTS[variant])
    found = narrow(1003, 1, "wide", torch.bfloat16, RoundingPlace(7, 9))
    expected = found.clone()
    kernel_(found, scalars_of(), build.load(("kernels_c.cpp",), flags=flags))
    op_by_op_(expected, scalars_of())
    assert_same_bits(found, expected)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 300), seed=st.integers(0, 1 << 30), kind=st.sampled_from(["normal", "wide"]), tied=st.booleans(),
       grad=st.sampled_from([torch.bfloat16, torch.float32]), place=PLACES_IN_MODEL)
def test_masters_in_halves_change_nothing(n: int, seed: int, kind: str, tied: bool, grad: torch.dtype, place: RoundingPlace) -> None:
    """The sign of a bf16 exp_avg_sq keeps which way a tie went, and its magnitude is rounded."""
    whole = replace(narrow(n, seed, kind, torch.bfloat16, place))
    whole.grad = whole.grad.to(grad)
    if tied:
        whole.master.copy_(((whole.master.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))
    high, low, marked = split(whole.master, whole.v)
    halves = replace(whole, v=marked, m=whole.m.clone())
    for step in (1, 2):
        kernel_(whole, scalars_of(step))
        split_kernel_(halves, high, low, scalars_of(step))
    states = replace(halves.row_states, table=NARROW, master=high, low=low)
    found = whole_states(states, CPU)
    assert different_bits(found.master, whole.master) == 0
    assert different_bits(found.states[0], whole.m) == 0
    assert different_bits(found.states[1], whole.v) == 0


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kernel=st.sampled_from(sorted(CUDA_KERNELS)), n=st.integers(1, 500), start_at=st.sampled_from([0, 1, 8]),
       seed=st.integers(0, 1 << 30), kind=st.sampled_from(["normal", "wide"]), place=PLACES_IN_MODEL)
def test_the_cuda_kernels_have_the_bits_of_the_cpus(
    run_rows: Run, kernel: int, n: int, start_at: int, seed: int, kind: str, place: RoundingPlace
) -> None:
    """As C++: vectors and tails, masters whole and in halves."""
    grad, out, halved = CUDA_KERNELS[kernel]
    whole = replace(operands(n + start_at, seed, kind, grad, out), vmax=None, place=place).narrow().cut(start_at, n + start_at)
    assert whole.out is not None
    whole.out.copy_(whole.master)
    high, low, marked = split(whole.master, whole.v)
    found = whole.clone()
    if halved:
        found = replace(found, v=marked, out=high)
    run_rows(len(CUDA_KERNELS_ALL) + kernel, [row_of(found, scalars_of(), low if halved else None)])
    kernel_(whole, scalars_of())
    if halved:
        states = whole_states(replace(found.row_states, table=NARROW, master=high, low=low), CPU)
        found = replace(found, master=states.master, v=states.states[1])
    assert_same_bits(found, whole)


CUDA_KERNELS_ALL = range(9)  # with fp32 states: those with bf16 ones come after them


@pytest.mark.parametrize(("number", "dtype"), [(15, torch.float32), (16, torch.bfloat16)])
def test_lion_in_bf16(run_rows: Run, number: int, dtype: torch.dtype) -> None:
    """The second kernel needs nothing of its own: C++, CUDA as C++, and torch operations agree."""
    o = operands(701, 1, "wide", dtype, None if dtype == torch.float32 else dtype)
    o = replace(o, vmax=None, m=o.m.bfloat16(), place=RoundingPlace(3, 4))
    scalars: UpdateScalars = LionScalars.of({"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, **BF16}, 5)
    torch_form, cpp, cuda = o.clone(), o.clone(), o.clone()
    of_lion = replace(torch_form.row_states, table=LION.under(BF16), states=(torch_form.m,))
    of_lion.update_(scalars, torch_form.grad, torch_form.out)
    for found in (cpp, cuda):
        found.v = found.v.bfloat16()
    kernel_(cpp, scalars)
    run_rows(number, [row_of(cuda, scalars, None)])
    for found in (cpp, cuda):
        assert different_bits(found.master, torch_form.master) == 0
        assert different_bits(found.m, torch_form.m) == 0


# ---- training ----


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(gpt_in(request.param), workers=2, moments="bf16", speculate=True, shadow_memory=32 << 20)
    yield made
    made.close()


def one_step(kind: str, model: Any, optimizer: Any, batches: Batches, step: int) -> float:
    for micro in range(2 if kind == "accumulated" else 1):
        loss = model(*batches[(step + micro) % len(batches)])
        loss.backward()
    if kind == "clipped":
        clip_grad_norm_(model.parameters(), 1e9 if step < 3 else 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.sample(1)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(st.tuples(CUTS, st.lists(st.sampled_from(list(Placement)), min_size=1, max_size=5)), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(["plain", "accumulated", "clipped", "clipped"]), min_size=2, max_size=5),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 1500), max_size=2),
)
def test_no_plan_or_cut_changes_a_bit(
    twins: Twins, plans: list[tuple[list[int], list[Placement]]], kinds: Sequence[str], delays: dict[Stage, int]
) -> None:
    """Losses and weights are the reference's; updates begin on a guess, and some are taken back."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for steps, places in plans:
            if model is twins.ours:
                twins.session.place(cut_plan(twins.session, steps, places))
            losses += [one_step(kind, model, optimizer, batches, step) for step, kind in enumerate(kinds)]
        return losses

    twins.agree(loop, delays)
    assert {state.dtype for _, states in twins.session.states for state in states.states} == {torch.bfloat16}


def test_the_torch_engine_has_the_same_bits() -> None:
    """Without a C++ compiler."""
    made = Twins(gpt_in(torch.bfloat16), moments="bf16", engine="torch", k=1)
    made.agree(lambda model, optimizer, batches: [one_step("clipped", model, optimizer, batches, step) for step in range(4)])
    made.close()


def mixed(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with moments in bf16, and vectors in fp32."""
    return [{"params": [p for p in model.parameters() if p.dim() > 1], **BF16}, {"params": [p for p in model.parameters() if p.dim() <= 1]}]


def test_groups_may_differ() -> None:
    """One optimizer keeps bf16 moments of matrices and fp32 ones of vectors."""
    results = []
    for ours in (False, True):
        model, batches = start(torch.bfloat16)
        torch._dynamo.reset()
        optimizer: Any = torch.optim.AdamW(mixed(model), **HYPER) if ours else HandAdam(mixed(model), **HYPER)
        if ours:
            hytrain_fx.compile(model, optimizer, k=0)
        else:
            model.compile()
        for step in range(4):
            model(*batches[step % 3]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        if ours:
            assert [states.states[1].dtype for _, states in session_of(model).states] == [
                torch.bfloat16 if p.dim() > 1 else torch.float32 for p in model.parameters()]
            hytrain_fx.close(model)
    assert_same(results[1], results[0])
