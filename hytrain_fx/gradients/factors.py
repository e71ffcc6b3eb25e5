"""The number by which torch really multiplies a gradient.

With it a multiplication can be written down and done later.

    g.mul_(c)   ==   g <- round_to_dtype_of_g(float32(g) * float32(m))
    m = effective_factor(c, ...)

Where g is bfloat16 or float16, m depends on the form: a Python number or a 0-dim CPU tensor enters
`mul_` as float32(c), but `_foreach_mul_` of a number on the CPU (torch 2.13) and a 0-dim CUDA
tensor (2.11) are rounded to g's dtype first. No release promises any of this, so the rule is read
off torch itself, once for each form, on a few numbers that tell the rules apart. A form that
follows neither rule has no factor: the gradient is brought back instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

Factor = float | Tensor
"""A float is exact in float32.

A tensor is 0-dim float32 on the gradient's device and belongs to the log alone.
"""

GRADIENTS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_TENSOR_FACTORS: Final = GRADIENTS | {torch.float64}
_MAX_EXACT_INT: Final = 2**24  # integers up to here are float32 numbers


class Form(Enum):
    """How a function takes the tensors it scales and the scale."""

    ONE = "f(g, c)"
    LIST = "f([g, ...], c)"
    LISTS = "f([g, ...], [c, ...])"


@dataclass(frozen=True)
class Scaling:
    """An in-place multiplication of torch's.

    `uniform`: its tensors share dtype and device (CUDA has another kernel where they do not).
    """

    function: Callable[..., Any]
    form: Form
    uniform: bool = True

    def __call__(self, gradient: Tensor, factor: object) -> None:
        """Scale one real tensor the way this call scales it."""
        if self.form is Form.ONE:
            self.function(gradient, factor)
            return
        odd = [] if self.uniform else [torch.ones(1, dtype=torch.float64, device=gradient.device)]
        tensors = [gradient, *odd]
        self.function(tensors, factor if self.form is Form.LIST else [factor] * len(tensors))


class _Entry(Enum):
    """What becomes of a factor before the product is taken in float32."""

    AS_FLOAT32 = "float32(c)"
    AS_GRADIENT = "float32(dtype_of_g(c))"


@dataclass(frozen=True)
class _Kind:
    """A kind of factor: a Python type, or a tensor of some dtype, on the CPU or not."""

    python: type | None = None
    dtype: torch.dtype | None = None
    on_cpu: bool = True


def effective_factor(factor: object, scaling: Scaling, dtype: torch.dtype, device: torch.device, dim: int) -> Factor | None:
    """The number m of the module docstring for a `dim`-dimensional gradient of `dtype` on `device`.

    None where there is none.

    A tensor on an accelerator is copied, so later edits of it change nothing; one on the CPU is
    read.
    """
    kind = _kind_of(factor, device)
    if kind is None or dtype not in GRADIENTS or dim == 0:  # a 0-dim gradient promotes with a 0-dim factor, unlike others
        return None
    entry = _entry(scaling, kind, dtype, device)
    if entry is None:
        return None
    if isinstance(factor, Tensor):
        seen = factor.detach() if entry is _Entry.AS_FLOAT32 else factor.detach().to(dtype)
        return _to_float32(seen.item()) if kind.on_cpu else seen.to(torch.float32, copy=True)
    number = float(factor)  # type: ignore[arg-type]
    return _to_float32(number if entry is _Entry.AS_FLOAT32 else torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item())


def _kind_of(factor: object, device: torch.device) -> _Kind | None:
    if type(factor) is float or (type(factor) is int and abs(factor) <= _MAX_EXACT_INT):
        return _Kind(python=type(factor))
    if type(factor) is not Tensor or factor.dim() != 0 or factor.dtype not in _TENSOR_FACTORS:
        return None
    if factor.requires_grad and torch.is_grad_enabled():  # the product would carry a graph
        return None
    on_cpu = factor.device.type == "cpu"
    return _Kind(dtype=factor.dtype, on_cpu=on_cpu) if on_cpu or factor.device == device else None


@cache
def _entry(scaling: Scaling, kind: _Kind, dtype: torch.dtype, device: torch.device) -> _Entry | None:
    """Which rule torch follows, found by trying."""
    # A tensor stays on the device, where `mul_` by it would round it to g's dtype: only a factor
    # that is a number of that dtype is logged.
    entries = tuple(_Entry) if kind.on_cpu or dtype == torch.float32 else (_Entry.AS_GRADIENT,)
    with torch.inference_mode(False), torch.no_grad():
        possible = [entry for entry in entries if all(_follows(entry, scaling, probe, dtype, device) for probe in _probes(kind, device))]
    return possible[0] if possible else None


def _probes(kind: _Kind, device: torch.device) -> list[Any]:
    """Factors whose products differ between the rules: by precision, and for float16 by range."""
    if kind.python is int:
        return [3, 257, 12345]
    numbers = [0.1234567891, 3e-9, 7e7]
    if kind.python is float:
        return list(numbers)
    return [torch.tensor(number, dtype=kind.dtype, device="cpu" if kind.on_cpu else device) for number in numbers]


def _follows(entry: _Entry, scaling: Scaling, factor: float | Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    gradient = torch.cat([torch.linspace(-1.9, 2.1, 67, device="cpu"), torch.tensor([6e4, -3e-5], device="cpu")]).to(device, dtype)
    exact = torch.as_tensor(factor, dtype=None if isinstance(factor, Tensor) else torch.float64, device="cpu")
    seen = (exact if entry is _Entry.AS_FLOAT32 else exact.to(dtype)).to(torch.float32)
    expected = (gradient.cpu().float() * seen).to(dtype)
    scaling(gradient, factor)
    return torch.equal(gradient.cpu(), expected)


def _to_float32(value: float) -> float | None:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:  # finite, but not in float32: torch decides what to do
        return None
