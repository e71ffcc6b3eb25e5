"""The number by which a gradient is multiplied where torch divides it by a whole number.

A pipeline's schedule divides each gradient by the number of its micro-batches:

    g.div_(n)   ==   g <- round_to_dtype_of_g(float32(g) * m),   m = float32(1 / n)

    n = 1, 2, 4, ...    exact, in every dtype
    16-bit gradients    g / n is never half-way between two numbers of 16 bits, and never so near to
                        it as m is off: both are rounded alike. Not so for a few n and the least
                        numbers of fp16
    fp32 on CUDA        torch multiplies by m, too
    fp32 on the CPU     torch divides, which rounds otherwise: there is no m

So each of the first few n is tried on torch itself, once: with every number of 16 bits, and with
many of 32.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Final

import torch

from hytrain_fx.gradients.factors import GRADIENTS

MOST: Final = 1 << 14
"""Largest divisor: the reciprocal is a number of every dtype of a gradient."""
_TRIED_FP32: Final = 1 << 16
_MOST_TRIED: Final = 16
"""Divisors that are tried of a dtype on a GPU. A schedule has one. A loop that divides by a new
number in each step would wait for the device each time."""


def reciprocal(divisor: object, dtype: torch.dtype, device: torch.device, dim: int) -> float | None:
    """The number m for a gradient of `dim` dimensions and `dtype` on `device`; None: there is none.

    Exact in float32. Waits for the device where a divisor that is no power of two is new.
    """
    if type(divisor) not in (int, float) or dtype not in GRADIENTS or not is_whole(divisor):  # type: ignore[arg-type]
        return None
    number = float(divisor)  # type: ignore[arg-type]
    if is_power_of_two(number):
        return 1.0 / number
    m = _fp32(1.0 / number)
    if not dim:
        return None
    known = _known(dtype, device)
    if number not in known:
        if device.type != "cpu" and len(known) == _MOST_TRIED:
            return None
        known[number] = _is_product(number, m, dtype, device)
    return m if known[number] else None


def is_reciprocal(factor: float) -> bool:
    """Whether a factor is float32(1 / n) of a whole number n, up to `MOST`."""
    return factor > 0.0 and is_whole(number := float(round(1.0 / factor))) and _fp32(1.0 / number) == factor


def is_whole(number: float) -> bool:
    """Whether it is 1, 2, 3, ... up to `MOST`."""
    return 1.0 <= number <= MOST and float(number).is_integer()


def is_power_of_two(number: float) -> bool:
    """Whether it is 1, 2, 4, ... up to `MOST`.

    Gradients that are divided by it have the bits of the product with its reciprocal.
    """
    return 1.0 <= number <= MOST and math.frexp(number)[0] == 0.5


@cache
def _known(dtype: torch.dtype, device: torch.device) -> dict[float, bool]:
    """What trials have found, by divisor."""
    return {}


def _is_product(number: float, m: float, dtype: torch.dtype, device: torch.device) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        tried = _tried(dtype).to(device)
        expected = (tried.float() * m).to(dtype)
        return torch.equal(tried.div_(number), expected)


def _tried(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype, on the CPU: all that are none of NaN, or of fp32 some of every size."""
    if dtype == torch.float32:
        bits = torch.arange(_TRIED_FP32, dtype=torch.int64, device="cpu") * 0x9E3779B1 & 0xFFFFFFFF
        found = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(dtype)
    else:
        found = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
    return found[~found.isnan()]


def _fp32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])
