"""A compiled graph that was traced with bf16 copies, called with the fp32 parameters that Dynamo knows.

    run([x, p0, p1])  ->  graph([x, q0, p1])        q0 in autograd's graph behind p0

Autograd finds the parameters where it looks for them: accumulation, hooks and torch.autograd.grad see p0. A gradient that comes back for q0
is widened, which is exact; those that our nodes take come back as None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Copies(torch.autograd.Function):
    """Parameters in, their copies out."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(copy.detach() for copy in copies)  # shares the version counter: what saves one is told when it was updated

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *(None if grad is None else grad.float() for grad in grads))


def with_copies(
    compiled: Callable[..., Any], positions: tuple[int, ...], copies_now: Callable[[], Sequence[torch.Tensor]]
) -> Callable[..., Any]:
    """What a torch.compile backend has made, called with copies instead of the inputs at these positions.

    `copies_now` runs before each call and gives them: the call itself holds none.
    """

    def exchanged(args: Sequence[Any]) -> list[Any]:
        copies = copies_now()
        given = list(args)
        if not positions:
            return given
        learns = torch.is_grad_enabled()
        linked = [i for i, position in enumerate(positions) if learns and given[position].requires_grad]
        behind = dict(enumerate(copies))
        if linked:
            behind.update(zip(linked, _Copies.apply([copies[i] for i in linked], *(given[positions[i]] for i in linked)), strict=True))  # type: ignore[no-untyped-call]
        for i, position in enumerate(positions):
            given[position] = behind[i]
        return given

    return lambda *args: compiled(*exchanged(args))
