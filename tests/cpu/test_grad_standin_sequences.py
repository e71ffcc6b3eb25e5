"""Random sequences of what loops do to gradients give the same bits on stand-ins.

Real gradients and a mixture of both are tried too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from .held_gradient import DEVICES, DTYPES, bits, grad_of, outcome, stood_in, with_real

Params = list[nn.Parameter]
Operation = Callable[[Params], Any]

ORDERS = (2.0, 1.0, float("inf"), 0.0, 3.0)
NUMBERS = st.sampled_from([0.5, 0.1234567891, -1.7, 0.0, 3.0, 1e-8, 6e4, float("inf"), float("nan"), 1.0])


def grads(params: Params) -> list[Tensor]:
    return [grad_of(p) for p in params]


def clip_norm(max_norm: float, order: float, foreach: bool | None, strict: bool) -> Operation:
    return lambda params: torch.nn.utils.clip_grad_norm_(params, max_norm, order, error_if_nonfinite=strict, foreach=foreach)


def clip_with_total(order: float, foreach: bool | None) -> Operation:
    def run(params: Params) -> Tensor:
        total: Tensor = torch.nn.utils.get_total_norm(grads(params), order, foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(params, 0.7, total, foreach=foreach)
        return total

    return run


def clip_value(bound: float, foreach: bool | None) -> Operation:
    return lambda params: torch.nn.utils.clip_grad_value_(params, bound, foreach=foreach)


def norms(order: float, form: str) -> Operation:
    if form == "foreach":
        return lambda params: torch._foreach_norm(grads(params), order)
    if form == "linalg":
        return lambda params: [torch.linalg.vector_norm(g, ord=order) for g in grads(params)]
    return lambda params: torch.stack([g.norm(order).float() for g in grads(params)])


def scale(number: float, form: str) -> Operation:
    def run(params: Params) -> None:
        for index, p in enumerate(params):
            grad = grad_of(p)
            if form == "mul_":
                assert grad.mul_(number) is grad
            elif form == "*=":
                grad *= number
            elif form == "data":
                grad.data.mul_(number)
            elif form == "detach" and index % 2:
                grad.detach().mul_(number)
            elif form == "div_":
                grad.div_(number)

    return run


def scale_by_tensor(number: float, dtype: torch.dtype, form: str, on_cpu: bool) -> Operation:
    def run(params: Params) -> None:
        factor = torch.tensor(number, dtype=dtype, device="cpu" if on_cpu else params[0].device)
        if form == "foreach":
            torch._foreach_mul_(grads(params), factor)
        elif form == "foreach list":
            torch._foreach_mul_(grads(params), [factor] * len(params))
        else:
            for grad in grads(params):
                grad.mul_(factor)
        factor.fill_(7.0)  # what was logged must not change with it

    return run


def foreach_scale(number: float, each: bool) -> Operation:
    return lambda params: bits(torch._foreach_mul_(grads(params), [number + i for i in range(len(params))] if each else number))


def unscale(inv_scale: float) -> Operation:
    def run(params: Params) -> Tensor:
        device = params[0].device
        found, inverse = torch.zeros(1, device=device), torch.full((), inv_scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads(params), found, inverse)
        return found

    return run


def accumulate(create_graph: bool) -> Operation:
    def run(params: Params) -> None:
        with torch.enable_grad():
            total = torch.stack([(p * p.exp() * 0.37).float().sum() for p in params]).sum()
            total.backward(create_graph=create_graph)
        for p in params:
            p.grad = grad_of(p).detach()

    return run


def zero(form: str) -> Operation:
    def run(params: Params) -> None:
        if form == "optimizer":
            torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=False)
        elif form == "foreach":
            torch._foreach_zero_(grads(params))
        else:
            grad_of(params[0]).zero_()

    return run


def edit(form: str) -> Operation:
    def run(params: Params) -> None:
        for grad in grads(params):
            if form == "add_":
                grad.add_(torch.ones_like(grad), alpha=0.25)
            elif form == "view":
                grad.reshape(-1)[::2].sub_(0.125) if grad.is_contiguous() else grad.t()[0].sub_(0.5)
            elif form == "setitem":
                grad[..., :1] = 0.3
            elif form == "copy_":
                grad.copy_(torch.full_like(grad, 0.7))
        if form == "foreach_add_":
            torch._foreach_add_(grads(params), grads(params)[::1], alpha=0.5)

    return run


def read(form: str) -> Operation:
    if form == "finite":
        return lambda params: [torch.isfinite(g).all() for g in grads(params)]
    if form == "max":
        return lambda params: [g.abs().max() for g in grads(params) if g.numel()]
    return lambda params: [g.float() for g in grads(params)]


FOREACH = st.sampled_from([None, True, False])
OPERATIONS = st.one_of(
    st.builds(clip_norm, st.sampled_from([0.5, 10.0]), st.sampled_from(ORDERS[:4]), FOREACH, st.booleans()),
    st.builds(clip_with_total, st.sampled_from(ORDERS), FOREACH),
    st.builds(clip_value, st.sampled_from([0.3, 2.0]), FOREACH),
    st.builds(norms, st.sampled_from(ORDERS), st.sampled_from(["foreach", "linalg", "method"])),
    st.builds(scale, NUMBERS, st.sampled_from(["mul_", "*=", "data", "detach", "div_"])),
    st.builds(
        scale_by_tensor,
        NUMBERS,
        st.sampled_from([*DTYPES, torch.float64, torch.int64]),
        st.sampled_from(["foreach", "foreach list", "loop"]),
        st.booleans(),
    ),
    st.builds(foreach_scale, NUMBERS, st.booleans()),
    st.builds(unscale, st.sampled_from([1.0, 1 / 1024, 0.3])),
    st.builds(accumulate, st.booleans()),
    st.builds(zero, st.sampled_from(["optimizer", "foreach", "one"])),
    st.builds(edit, st.sampled_from(["add_", "view", "setitem", "copy_", "foreach_add_"])),
    st.builds(read, st.sampled_from(["finite", "max", "float"])),
)


@dataclass(frozen=True)
class Setting:
    """The gradients of one example.

    It has their dtype (None: mixed), which are stood in for, and which norms their sources know.
    """

    dtype: torch.dtype | None
    replaced: tuple[bool, ...]
    known: frozenset[tuple[float, bool]]
    seed: int
    large: bool
    with_empty: bool


SHAPES = ((3, 4), (5,), (1,), (), (7, 2), (2, 33), (0, 3))
SETTINGS = st.builds(
    Setting,
    st.sampled_from([*DTYPES, *DTYPES, None]),
    st.tuples(*[st.sampled_from([True, True, False])] * len(SHAPES)),
    st.frozensets(st.tuples(st.sampled_from(ORDERS), st.booleans())),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)


def make(setting: Setting, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(setting.seed)
    tensors = []
    for index, shape in enumerate(SHAPES[: None if setting.with_empty else -1]):
        tensor = torch.randn(shape, generator=generator) * (3e4 if setting.large and index == 1 else 1.0)
        tensor = tensor.to(setting.dtype or DTYPES[index % 3]).to(device)
        tensors.append(tensor.t().clone(memory_format=torch.preserve_format) if shape == (7, 2) else tensor)
    return tensors


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS, operations=st.lists(OPERATIONS, min_size=1, max_size=7))
def test_a_sequence_gives_the_same_bits(device: str, setting: Setting, operations: list[Operation]) -> None:
    """Results, errors' types and final gradients are those of the same calls on real gradients."""
    tensors = make(setting, device)
    real = [with_real(t) for t in tensors]
    mixed = [stood_in(t, setting.known)[0] if r else with_real(t) for t, r in zip(tensors, setting.replaced, strict=False)]
    for index, operation in enumerate(operations):
        expected = outcome(lambda: operation(real))  # noqa: B023
        assert outcome(lambda: operation(mixed)) == expected, index  # noqa: B023
        if isinstance(expected, type):
            break  # an op that raises half way may have written anything
    else:
        assert bits(grads(mixed)) == bits(grads(real))
