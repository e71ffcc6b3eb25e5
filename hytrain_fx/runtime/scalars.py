"""The numbers of one step as kernels take them, whichever kernel it is.

Also how they are read from a group's options.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from numbers import Real
from typing import ClassVar

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.limits import MAX_FACTORS
from hytrain_fx.ir.states import Kernel

Coefficient = float | torch.Tensor
"""A number, or a real tensor of 0 dimensions."""


class UpdateFlag(IntFlag):
    """Bits of `UpdateScalars.flags`; mirrors UpdateFlags in csrc/update_scalars.h."""

    MAXIMIZE = 1
    AMSGRAD = 2
    L2 = 4
    LERP_FROM_END = 8
    TORCH_CUDA = 16
    WIDE_FACTORS = 32


class ScalarsStruct(ctypes.Structure):
    """UpdateScalars as C++ and CUDA take it, 68 bytes; mirrors csrc/update_scalars.h."""

    _fields_ = (
        ("decay", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("lerp", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("neg_step_size", ctypes.c_float),
        ("bias2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("flags", ctypes.c_uint32),
        ("factor_count", ctypes.c_uint32),
        ("factors", ctypes.c_float * MAX_FACTORS),
        ("kernel", ctypes.c_uint32),
        ("beta1", ctypes.c_float),
        ("rounding_key", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScalars(ABC):
    """What one step multiplies, adds and divides by; every float holds a binary32 value.

    flags      of `UpdateFlag`
    factors    multiplications of the gradient, in order, at most MAX_FACTORS; each rounded to the
               gradient's dtype, with WIDE_FACTORS to binary32
    rounding_key    of seed and step, for states in bf16 (rounding.py)
    """

    kernel: ClassVar[Kernel]

    flags: int = 0
    factors: tuple[float, ...] = ()
    rounding_key: int = 0

    @property
    def c_struct(self) -> ScalarsStruct:
        """A new ctypes structure with these values, zero for those of other kernels."""
        numbers = {of.name: getattr(self, of.name) for of in fields(self) if of.name != "factors"}
        factors = (ctypes.c_float * MAX_FACTORS)(*self.factors)
        return ScalarsStruct(kernel=self.kernel, factor_count=len(self.factors), factors=factors, **numbers)

    @abstractmethod
    def update_(
        self, grad: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor], out: torch.Tensor | None = None
    ) -> None:
        """One step op by op, on any device, with the kernel's bits.

        grad     [n] fp32, bf16 or fp16
        master   [n] fp32, in place, as are the states, in the order of ir/states.py
        out      [n] the new weight, rounded to nearest even; may be the memory of grad
        """


def read_gradient(grad: torch.Tensor, scalars: UpdateScalars) -> torch.Tensor:
    """The gradient in fp32, its factors applied."""
    g = grad.float() if scalars.flags & UpdateFlag.WIDE_FACTORS else grad
    for factor in scalars.factors:
        g = (g.float() * factor).to(g.dtype)
    g = g.float()
    return -g if scalars.flags & UpdateFlag.MAXIMIZE else g


def number(group: Mapping[str, object], key: str) -> float:
    """An option as the group has it.

    A numpy float computes in its own precision, as it does in torch's step.

    A 0-dim tensor is read here, which waits for its device. Raises UnsupportedError.
    """
    return _number(_option(group, key), key)


def pair(group: Mapping[str, object], key: str) -> tuple[float, float]:
    """Like `number`, for an option of two."""
    first, second = _two(group, key)
    return _number(first, key), _number(second, key)


def coefficient(group: Mapping[str, object], key: str) -> Coefficient:
    """An option as torch's step computes with it: a tensor stays one, in its dtype and place."""
    return _coefficient(_option(group, key), key)


def coefficients(group: Mapping[str, object], key: str) -> tuple[Coefficient, Coefficient]:
    """Like `coefficient`, for an option of two."""
    first, second = _two(group, key)
    return _coefficient(first, key), _coefficient(second, key)


def f32(value: Coefficient) -> float:
    """Nearest binary32, as a Python float. Reading a tensor waits for its device."""
    return ctypes.c_float(value).value  # type: ignore[arg-type]


def _option(group: Mapping[str, object], key: str) -> object:
    if key not in group:
        raise UnsupportedError(f"a parameter group has no {key!r}, only {sorted(group)}; write it back: group[{key!r}] = ...")
    return group[key]


def _two(group: Mapping[str, object], key: str) -> Sequence[object]:
    value = _option(group, key)
    if isinstance(value, tuple | list) and len(value) == 2:
        return value
    raise UnsupportedError(f"{key} of a parameter group is {value!r}: expected a pair of numbers")


def _number(value: object, key: str) -> float:
    found = _coefficient(value, key)
    return float(found.item()) if isinstance(found, torch.Tensor) else found


def _coefficient(value: object, key: str) -> Coefficient:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    if isinstance(value, Real):
        return value  # type: ignore[return-value]
    raise UnsupportedError(f"{key} of a parameter group is {value!r}: expected a number or a tensor of one element")
