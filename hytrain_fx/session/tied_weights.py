"""A weight that several stages of a pipeline have: an embedding, and the head that is tied to it.

    step(), or what comes before it    the stages' gradients are added up, once, over their ranks
    the update                         each stage does it, on the same gradient: the same bits

The sum is taken before gradients are clipped over stages and before a GradScaler looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function


class TiedWeight:
    """This rank's copy of one such weight.

    row           its row in its session
    saved_as      its name in checkpoints, the same in all stages
    is_counted    whether its gradient counts in a norm over all stages: that of one copy does

    ranks         those that have a copy
    parameter     this rank's, contiguous
    runs          how often each kind of node of its session ran
    """

    def __init__(self, row: int, saved_as: str, ranks: Ranks, parameter: torch.Tensor, runs: Mapping[str, int]) -> None:
        self.row = row
        self.saved_as = saved_as
        self.is_counted = ranks.rank == 0
        self.parameter = parameter
        self._ranks = ranks
        self._runs = runs
        self._sum: torch.Tensor | None = None
        self._summed_at = -1  # how many backwards of graphs there were then
        self._is_summed = False  # since the last step

    def begin_alike(self) -> None:
        """Give this copy the values of the first rank's. One that has them is not written."""
        with torch.no_grad():
            own = self.parameter.detach().clone()
            first = self._ranks.from_owner(0, own, f"the values of {self.saved_as}").to(own.device)
            if not torch.equal(first, own):
                self.parameter.copy_(first)

    def add_up(self) -> None:
        """`.grad` becomes the sum of all copies' gradients, once after the backwards of a step.

        A copy without a gradient adds nothing. Every rank that has a copy must call it. Raises
        UnsupportedError where a backward has added to a sum, RankError where a rank does not come.
        """
        backwards = self._runs["backward_end"]
        if self._summed_at == backwards and (backwards > 0 or self._is_summed):  # of a stage that runs eagerly none is counted
            return
        with torch.no_grad(), without_torch_function():
            grad = get_grad(self.parameter)
            if self._sum is not None and grad is self._sum:
                raise UnsupportedError(
                    f"a backward came after the gradients of {self.saved_as}, which several stages have, were added up for clipping or "
                    "for a GradScaler: run all backwards of a step first")
            values = grad.grad_state.copy_out() if isinstance(grad, GradStandIn) else grad
            summed = self._added(values)
            if values is not None or summed is not None:
                set_grad(self.parameter, summed)
        self._sum, self._summed_at, self._is_summed = summed, backwards, True

    def _added(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """The sum over the ranks; None where no rank has a gradient."""
        parameter, count = self.parameter, self.parameter.numel()
        packed = torch.zeros(count + 1, dtype=parameter.dtype, device=parameter.device)  # the last element: how many have one
        if own is not None:
            packed[:count].view(parameter.shape).copy_(own)
            packed[count] = 1.0
        self._ranks.add_up(packed, f"the gradients of {self.saved_as}")
        if own is None and not bool(packed[count]):
            return None
        return packed[:count].view(parameter.shape)

    def dropped(self) -> None:
        """A step has taken the gradient, or it is gone."""
        self._sum, self._is_summed = None, False
