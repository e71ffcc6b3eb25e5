"""States that rest in bf16: rounding by chance, with the same chance wherever an update runs.

`moments="bf16"` halves what Adam's two moments take. An update computes with their values in fp32
and leaves each moment as one of the two bf16 numbers beside its fp32 value: the upper one as often
as the value is near it, so that the mean is the value ("stochastic rounding"; for training see
Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). Rounding to nearest would
stand still: at beta2 = 0.999 a step changes exp_avg_sq by a thousandth at most, and half of the
last bit of bf16 is 1/512 to 1/256.

The chance is a hash of seed, step, parameter and element (csrc/random_bits.h). So training has the
same bits for every plan, cut, number of workers and ranks, and after undo, save and resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Final, TypeVar

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MOMENTS_SEED, moments_of

_MASK: Final = 0xFFFFFFFF
_OF_STEPS, _OF_PARAMETERS = 0x9E3779B9, 0x85EBCA6B  # so that the two kinds of key are apart
_Bits = TypeVar("_Bits", int, torch.Tensor)


def random_bits(element: _Bits, key: int) -> _Bits:
    """32 random bits of an element, or of a tensor of them [n] int64, as csrc/random_bits.h."""
    x = element & _MASK
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & _MASK ^ key
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 14)


def parameter_key(number: int) -> int:
    """The key of the parameter with this number in the optimizer's state_dict()."""
    return random_bits(number, _OF_PARAMETERS)


def rounding_key(group: Mapping[str, object], step: float) -> int:
    """The key of one step of a parameter group, 0 where its moments are fp32.

    step    1 for the first

    Raises UnsupportedError for a `moments` or a `moments_seed` that cannot be.
    """
    if moments_of(group) is None:
        return 0
    seed = group.get(MOMENTS_SEED, 0)
    if not isinstance(seed, Integral):
        raise UnsupportedError(f"{MOMENTS_SEED} of a parameter group is {seed!r}: expected an int")
    number = int(seed)
    return random_bits(int(step), random_bits(number & _MASK, random_bits(number >> 32 & _MASK, _OF_STEPS)))


@dataclass(frozen=True, slots=True)
class RoundingPlace:
    """What of the chance belongs to the place of some states in the model.

    key      `parameter_key` of their parameter
    first    number of their first element in it, in the order of its memory
    """

    key: int = 0
    first: int = 0

    def after(self, elements: int) -> RoundingPlace:
        """The place of the states that come so many elements later."""
        return RoundingPlace(self.key, self.first + elements) if elements else self


NO_PLACE: Final = RoundingPlace()
"""Of states whose values are all that counts."""


def rounded(values: torch.Tensor, place: RoundingPlace, key: int, number: int) -> torch.Tensor:
    """What an update leaves of state `number`, whose fp32 value is `values` [n]: [n] bf16.

    key    `rounding_key` of the step
    """
    elements = torch.arange(place.first, place.first + values.numel(), device=values.device)
    chance = random_bits(elements, key ^ place.key) >> (0 if number == 0 else 16) & 0xFFFF
    bits = (values.view(torch.int32).to(torch.int64) & _MASK) + chance
    half = (bits >> 16).to(torch.int16).view(torch.bfloat16)  # the low 16 bits of the result stay
    return torch.where(values.isnan(), torch.full_like(half, torch.nan), half)
