"""Gradients that come in another order of memory than their parameters'."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hytrain_fx.gradients.rows import RowGroup, in_same_order


def group_of(*parameters: nn.Parameter) -> RowGroup:
    """The rows of one node, all on the host."""
    rows, count = tuple(range(len(parameters))), len(parameters)
    strides = [parameter.stride() for parameter in parameters]
    group = RowGroup(rows, parameters, parameters, strides, [torch.float32] * count, [torch.strided] * count)
    group.on_host = group.part(rows)
    return group


@st.composite
def drawn(draw: st.DrawFn) -> tuple[nn.Parameter, torch.Tensor]:
    """A parameter, and a gradient of its shape; their dimensions lie in any order in memory."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))

    def in_some_order() -> torch.Tensor:
        order = draw(st.permutations(range(len(shape))))
        tensor = torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
        assert list(tensor.shape) == shape
        return tensor

    return nn.Parameter(in_some_order()), in_some_order()


@given(st.lists(drawn(), min_size=1, max_size=3))
def test_flat_ranges_agree_with_the_parameters_ones(pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Element by element in memory, and again with what was noted the first time.

    Only what is in another order is copied.
    """
    parameters, grads = zip(*pairs, strict=True)
    group = group_of(*parameters)
    for _ in range(2):
        fits, laid_out = group.laid_out(grads)
        assert fits
        for parameter, grad, given_one in zip(parameters, grads, laid_out, strict=True):
            assert torch.equal(grad, given_one)
            in_memory = torch.empty_like(parameter.detach()).copy_(grad)
            count = (grad.numel(),), (1,)
            assert torch.equal(in_memory.as_strided(*count), given_one.as_strided(*count))
            assert (given_one is grad) == torch.equal(in_memory.as_strided(*count), grad.as_strided(*count))
        assert group.fits(grads) == all(one is another for one, another in zip(grads, laid_out, strict=True))
        assert in_same_order(parameters, grads) == group.fits(grads)


def test_rows_on_the_device_are_not_copied_twice() -> None:
    """Theirs are copied when they are kept."""
    group = group_of(nn.Parameter(torch.zeros(5, 2)))
    group.on_host, group.on_device = group.on_device, group.on_host
    grads = [torch.randn(2, 5).t()]
    assert group.laid_out(grads) == (True, grads)
    assert not group.fits(grads)


@pytest.mark.parametrize("grad", [torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(2, 6), torch.randn(4, 3).to_sparse()],
                         ids=["dtype", "shape", "sparse"])
def test_what_is_no_question_of_order_stays(grad: torch.Tensor) -> None:
    """Nothing is copied, also not the gradient beside it. The slower way deals with it."""
    group = group_of(nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5, 2)))
    grads = [grad, torch.randn(2, 5).t()]
    assert group.laid_out(grads) == (False, grads)
    assert not group.fits(grads)
