"""A weight that several stages of a pipeline have: an embedding, and the head that is tied to it.

    step(), or what comes before it    the stages' gradients are added up, once, over their ranks
    the update                         each stage does it, on the same gradient: the same bits

The sum is taken before gradients are clipped over stages and before a GradScaler looks at them.
States that differ would have the copies train apart. So they are compared when copies are tied, and
once more where a rank has loaded states since: the ranks tell each other so before each sum.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence

import torch

from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.rank_errors import told_to_ranks
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.session import Session
from hytrain_fx.session.state_dict import ParameterStates
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function


class TiedWeight:
    """This rank's copy of one such weight.

    row           its row in its session
    saved_as      its name in checkpoints, the same in all stages
    is_counted    whether its gradient counts in a norm over all stages: that of one copy does
    is_loaded     whether states were loaded since the copies were compared last

    ranks         those that have a copy
    holders       their numbers in the pipeline
    session       of this rank's copy, which is contiguous
    """

    def __init__(self, row: int, saved_as: str, ranks: Ranks, holders: Sequence[int], session: Session) -> None:
        self.row = row
        self.saved_as = saved_as
        self.is_counted = ranks.rank == 0
        self.is_loaded = False
        self.parameter = session.table.parameters[row]
        self._ranks = ranks
        self._holders = holders
        self._session = weakref.ref(session)
        self._sum: torch.Tensor | None = None
        self._summed_at = -1  # the session's number of backwards then
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
        UnsupportedError where a backward has added to a sum, RankError where a rank does not come,
        ConfigError where states were loaded that differ.
        """
        session = self._session()
        assert session is not None  # it steps
        backwards = session.nodes.backwards
        if self._summed_at == backwards and (backwards > 0 or self._is_summed):  # of some eager code none is counted
            return
        with told_to_ranks("the step", lambda: self._ranks), without_torch_function():
            grad = get_grad(self.parameter)
            if self._sum is not None and grad is self._sum:
                raise UnsupportedError(
                    f"a backward came after the gradients of {self.saved_as}, which several stages have, were added up for clipping or "
                    "for a step of this rank: run all backwards of a step first, and step all optimizers of such weights in it")
        self._compare_loaded(session)
        with torch.no_grad(), without_torch_function():
            values = grad.grad_state.copy_out() if isinstance(grad, GradStandIn) else grad
            summed = self._added(values)
            if values is not None or summed is not None:
                set_grad(self.parameter, summed)
        self._sum, self._summed_at, self._is_summed = summed, backwards, True

    def _compare_loaded(self, session: Session) -> None:
        """Where a rank has loaded states since they were compared last. Raises ConfigError."""
        if any(self._ranks.tell_number(f"the gradients of {self.saved_as}", int(self.is_loaded))):
            own = f"weight {_digest(self.parameter)}, {states_in_words(session, self.row)}"
            require_same_states(self.saved_as, dict(zip(self._holders, self._ranks.of_all("states of tied weights", own), strict=True)))
            self.is_loaded = False

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


def states_in_words(session: Session, row: int) -> str:
    """Those of one parameter, with a digest of each tensor: alike where they have the same bits.

    Waits for running updates.
    """
    entry = ParameterStates(session)[session.table.parameters[row]]
    return ", ".join(f"{name} {_digest(entry[name])}" for name in sorted(entry, key=lambda name: (name != "step", name))) or "no step yet"


def require_same_states(name: str, of_ranks: Mapping[int, str]) -> None:
    """Raises ConfigError, on every rank, where copies of this weight have different states.

    of_ranks   in words, by rank
    """
    (first, words), *others = of_ranks.items()
    for rank, of_other in others:
        if of_other != words:
            raise ConfigError(f"tie_weights: states of {name} differ: {words} on rank {first}, {of_other} on rank {rank}; load the same "
                              "entry of a checkpoint into the optimizers of all copies, or tie them before their first step")


def _digest(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.dim() == 0:
        return f"{value.item():g}"
    with torch.no_grad():
        flat = value.detach().to("cpu").contiguous().reshape(-1)
    return "#" + hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()[:8]
