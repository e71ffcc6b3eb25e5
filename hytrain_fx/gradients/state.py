"""What is known of one offloaded gradient, in one of four forms.

    clean    source alone
    scaled   source and factors: g <- round(float32(g) * factor), in order
    zeroed   a ZeroSource (and factors)
    real     a tensor on the device holds the values; every later op goes to it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from hytrain_fx.errors import EngineError
from hytrain_fx.gradients.divisors import is_reciprocal
from hytrain_fx.gradients.factors import Factor
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.runtime.side_stream import read_here

MAX_LOGGED_FACTORS: Final = 4
"""Factors kept before the gradient is brought back instead: a clip, an unscale and two by hand."""

class GradSource(Protocol):
    """Where the values of one offloaded gradient are.

    All methods are called on the thread that touches the stand-in.
    """

    def fetch(self) -> Tensor:
        """A fresh tensor on the parameter's device with the gradient's bits.

        It is ordered on the current stream; the caller owns it.

        Raises GradientConsumedError after it was dropped and another has taken its memory.
        """

    def home(self) -> Tensor:
        """The same of what is updated here: of a sharded gradient, this rank's shard, flat."""

    @property
    def shards(self) -> GradientShards | None:
        """Where the rest of a sharded gradient is; None for a whole one."""

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> Tensor | None:
        """The 0-dim device tensor that torch gives for this gradient, or for its shard, in fp32.

        None if it was not computed.

        scale   by what its values are multiplied before: `GradState.scale`

        `foreach=True`: of `torch._foreach_norm`; False: of `torch.linalg.vector_norm`. On CUDA
        their float32 results may differ. The caller may write to what it gets: hand out a tensor
        that nobody reads again.
        """

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        """Somebody asked for this norm and it was not there.

        Compute it at offload from the next step on.
        """

    def is_live(self) -> bool:
        """Whether `fetch` can still succeed."""


class ZeroSource:
    """The source of a gradient after `zero_()`: zeros of the given metadata, made when asked."""

    def __init__(self, size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._strides, self._dtype, self._device = size, strides, dtype, device

    shards = None

    def fetch(self) -> Tensor:
        return torch.empty_strided(self._size, self._strides, dtype=self._dtype, device=self._device).zero_()

    home = fetch

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> Tensor | None:
        return None

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        return None

    def is_live(self) -> bool:
        return True


class GradState:
    """The state of one gradient, in one of the four forms above.

    Shared by a stand-in and those detached from it.

    added   whether C++ has reached the values without Python's knowing: autograd adds to them so
    """

    __slots__ = ("__weakref__", "added", "factors", "parameter", "real", "source")

    def __init__(self, parameter: Tensor, source: GradSource) -> None:
        self.source = source
        self.factors: tuple[Factor, ...] = ()
        self.real: Tensor | None = None
        self.added = False
        self.parameter: weakref.ref[Tensor] = weakref.ref(parameter)

    def copy_out(self) -> Tensor:
        """A fresh real tensor with the gradient's present values; the state stays as it is.

        Raises GradientConsumedError.
        """
        return self._with_factors(self.source.fetch)

    def copy_home(self) -> Tensor:
        """The same of what is updated here. Raises GradientConsumedError."""
        return self._with_factors(self.source.home)

    def _with_factors(self, fetch: Callable[[], Tensor]) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be edited later
            real = fetch()
            if type(real) is not Tensor:  # a FakeTensor, when a tracer runs us: it must never become the gradient
                raise EngineError(f"the source of a gradient returned a {type(real).__name__}, expected a plain tensor; "
                                  "gradients cannot be read while torch traces")
            for factor in self.factors:
                real.mul_(factor)
                if isinstance(factor, Tensor):
                    read_here(factor)
        return real

    def log(self, factor: Factor) -> bool:
        """Note one more factor.

        False, and nothing noted, if the gradient is real or has as many as are kept.
        """
        if isinstance(factor, float) and factor == 1.0 and self.real is None:
            return True
        if self.real is not None or len(self.factors) == MAX_LOGGED_FACTORS:
            return False
        self.factors = (*self.factors, factor)
        return True

    @property
    def scale(self) -> float | None:
        """What its factors come to, 1 or a whole number's reciprocal; None for others.

        Norms are taken with it when a gradient is made.
        """
        if not self.factors:
            return 1.0
        (only, *more) = self.factors
        return only if not more and isinstance(only, float) and is_reciprocal(only) else None

    def materialize(self) -> Tensor:
        """The real gradient, which from now on holds the values. Raises GradientConsumedError."""
        if self.real is None:
            self.real = self.copy_out()
            self.factors = ()
        return self.real

    def become_parameter_grad(self) -> None:
        """Put the real tensor where the parameter still shows a stand-in of this gradient."""
        parameter = self.parameter()
        if parameter is None or self.real is None:
            return
        if state_of(parameter.grad) is self:
            parameter.grad = self.real

    def zero(self, standin: Tensor) -> None:
        """Note that every value is now zero.

        Does not need the old values, so it also works after `step()`.
        """
        self.source = ZeroSource(standin.shape, standin.stride(), standin.dtype, standin.device)
        self.factors = ()


def state_of(value: object) -> GradState | None:
    """The state of a stand-in; None for anything else."""
    state = getattr(value, "grad_state", None)
    return state if isinstance(state, GradState) else None
