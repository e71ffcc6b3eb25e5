"""Scaling a stand-in: what is logged, how it is rounded, and what is left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hytrain_fx
from hytrain_fx.api import session_of

from .held_gradient import DEVICES, DTYPES, KNOWN, bits, grad_of, gradient, standin_of, stood_in


def test_a_norm_after_scaling_counts_the_scaling() -> None:
    """With factors logged, the norm is the scaled gradient's, not the one taken at offload.

    The factors stay logged.
    """
    parameter, _ = stood_in(gradient(), KNOWN)
    grad_of(parameter).mul_(0.1)
    assert bits(grad_of(parameter).norm()) == bits(gradient().mul_(0.1).norm())
    assert len(standin_of(parameter).factors) == 1


FACTORS = st.one_of(
    st.floats(width=64, min_value=-1e4, max_value=1e4),
    st.integers(-70000, 70000),
    st.builds(
        lambda number, dtype: torch.tensor(number, dtype=dtype),
        st.floats(-1e4, 1e4),
        st.sampled_from([*DTYPES, torch.float64]),
    ),
)
SCALE: dict[str, Callable[[Tensor, Any], Any]] = {
    "mul_": lambda g, c: g.mul_(c),
    "foreach": lambda g, c: torch._foreach_mul_([g], c),
    "lists": lambda g, c: torch._foreach_mul_([g], [c]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", SCALE)
@settings(deadline=None, max_examples=150)
@given(dtype=st.sampled_from(DTYPES), factor=FACTORS, beside=st.booleans())
def test_logged_factors_follow_the_documented_rounding(device: str, form: str, dtype: torch.dtype, factor: Any, beside: bool) -> None:
    """Factor by factor, round(float32(g) * factor) has the bits of the call on a real gradient."""
    if beside and isinstance(factor, Tensor):
        factor = factor.to(device)
    expected = gradient(dtype, device, (67,))
    parameter, source = stood_in(expected)
    SCALE[form](expected, factor)
    SCALE[form](grad_of(parameter), factor)
    logged = standin_of(parameter).factors
    assert standin_of(parameter).materialized is None
    ours = source.fetch()
    for m in logged:
        assert isinstance(m, float) or (m.dtype, m.dim(), m.device) == (torch.float32, 0, ours.device)
        assert not isinstance(m, float) or float(np.float32(m)) == m
        ours = (ours.float() * m).to(dtype)
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_division_by_a_whole_number_is_logged(dtype: torch.dtype) -> None:
    """So a pipeline's schedule, which divides by its micro-batches, brings no gradient back.

    The bits are those of a real gradient, of every number that 16 bits have. What torch does not
    do by a product is left to it: fp32 by other numbers than powers of two on the CPU, by 14 the
    least numbers of fp16, and what is no whole number up to 2^14.
    """
    narrow = dtype != torch.float32
    all_16_bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype if narrow else torch.bfloat16)
    numbers = all_16_bits[~all_16_bits.isnan()].to(dtype)
    for divisor, is_logged in ((8, True), (2.0**14, True), (1, True), (3, narrow), (6, narrow), (999.0, narrow),
                               (14, dtype == torch.bfloat16), (2.0**15, False), (0.5, False), (2.5, False), (-4, False)):
        expected = numbers.clone()
        parameter, _ = stood_in(expected)
        grad_of(parameter).div_(divisor)
        grad_of(parameter).mul_(0.3)
        expected.div_(divisor).mul_(0.3)
        assert (type(parameter.grad) is not Tensor) == is_logged, divisor
        assert bits(grad_of(parameter).clone()) == bits(expected)


def test_a_fifth_factor_brings_the_gradient_back() -> None:
    """Four factors are logged; the next multiplication is done on the real tensor."""
    parameter, _ = stood_in(gradient(torch.bfloat16))
    expected = gradient(torch.bfloat16)
    for factor in (0.9, 1.1, 0.7, 1.3, 0.3):
        grad_of(parameter).mul_(factor)
        expected.mul_(factor)
    assert type(parameter.grad) is Tensor
    assert bits(parameter.grad) == bits(expected)


@pytest.mark.parametrize("factor", [torch.tensor([2.0]), torch.tensor(2), True, 2**24 + 1, 1e300, torch.ones(3, 4)], ids=repr)
def test_a_factor_without_a_float32_number_is_not_logged(factor: Any) -> None:
    """Factors that promote, broadcast or overflow float32 are left to torch.

    It scales the real gradient.
    """
    parameter, _ = stood_in(gradient())
    standin = standin_of(parameter)
    standin.mul_(factor)
    assert standin.factors == ()
    assert standin.materialized is not None
    assert bits(standin.materialized) == bits(gradient().mul_(factor))


def test_a_scalar_gradient_is_scaled_by_torch() -> None:
    """A 0-dim gradient takes part in promotion, so no factor of it is logged.

    Scaled by a float64 scalar, the product is taken in float64.
    """
    for value in (0.1, 0.3, 0.7, 1.1, 1.9, 2.3):
        (parameter, _), expected = stood_in(torch.tensor(value)), torch.tensor(value)
        factor = torch.tensor(0.1234567891, dtype=torch.float64)
        assert bits(grad_of(parameter).mul_(factor)) == bits(expected.mul_(factor))


def test_scaling_a_list_by_one_of_its_own_keeps_the_order() -> None:
    """Where a scaled tensor is also a scale, the products are taken in the order of the list."""
    real = [gradient(), gradient() + 1]
    mixed = [real[0].clone(), standin_of(stood_in(real[1])[0])]
    for first, second in (real, mixed):
        torch._foreach_mul_([first, second], [second, torch.tensor(0.5)])
    assert bits([t.clone() for t in mixed]) == bits(real)


def test_zeroing_forgets_what_was_logged() -> None:
    """A factor logged before `zero_` does not make nan of the zeros."""
    parameter, source = stood_in(gradient())
    grad_of(parameter).mul_(float("inf")).zero_()
    assert bits(grad_of(parameter).clone()) == bits(torch.zeros(3, 4))
    assert source.fetches == 0


def test_unscaling_after_scaling_finds_the_overflow() -> None:
    """The inf-norm taken at offload says nothing of a gradient that was scaled since."""
    parameter, _ = stood_in(gradient(), KNOWN)
    grad_of(parameter).mul_(3e38).mul_(3e38)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad_of(parameter)], found, torch.tensor(0.5))
    assert found.item() == 1.0


def test_a_factor_that_needs_grad_keeps_its_graph() -> None:
    """With grad mode on, a factor that requires grad scales the real gradient.

    That gradient then has a graph.
    """
    parameter, _ = stood_in(gradient())
    weight = torch.tensor(2.0, requires_grad=True)
    grad_of(parameter).mul_(weight)
    grad_of(parameter).sum().backward()
    assert bits(weight.grad) == bits(gradient().sum())


def test_a_loop_that_divides_by_another_number_in_each_step_has_one_more_norm_taken() -> None:
    """And not one for each number that it has ever divided by."""
    torch._dynamo.reset()
    model: Any = nn.Linear(8, 8).to(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    wanted = session_of(model).nodes.gradients.slots.norms_wanted
    for number in range(3, 11):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        for p in model.parameters():
            p.grad.div_(number)
        found = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert torch.equal(found, nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    assert len([norm for norm in wanted if norm[2] != 1.0]) == 1
    hytrain_fx.close(model)
