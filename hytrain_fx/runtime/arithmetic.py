"""The one AdamW/Adam update, op by op in torch, and the scalars that it takes.

`csrc/adamw.h` states the expression. There are two forms of it, chosen by a flag, each the same
bits on every device:

    torch_cpu    torch.optim.Adam/AdamW(foreach=False) on a CPU with AVX2 or AVX-512, except that
                 the square root is correctly rounded. torch takes it from MKL, where 0.6% of the
                 results are one unit in the last place off (none, or 17%, under other settings of
                 MKL), so torch's own bits depend on the machine. With that one op replaced in torch
                 every bit agrees; with it, moments still agree, and the step of a parameter differs
                 by at most 4 units in the last place of the step, before it is added.
    torch_cuda   torch.optim.Adam/AdamW(foreach=True) on CUDA, where square roots are correctly
                 rounded (as torch's CUDA sources have it; tests/gpu/test_cuda_adamw_bits.py holds
                 it).

They differ in two fused multiply-adds: the last bit of 0.2% of v and 0.1% of the parameters in a
step. fused=True on the CPU gives the torch_cpu bits in whole vectors, others in v in the tail of
each thread's range. Not mirrored: fused=True on CUDA, capturable=True, and foreach=False on CUDA,
which multiplies by 1 / sqrt(1 - beta2^step) instead of dividing. NaN stays NaN; its payload and
sign are not fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.limits import MAX_FACTORS
from hytrain_fx.ir.states import ADAMW, Kernel
from hytrain_fx.runtime.rounding import rounding_key
from hytrain_fx.runtime.scalars import Coefficient, UpdateFlag, UpdateScalars, coefficient, coefficients, f32, number, pair, read_gradient


@dataclass(frozen=True, slots=True)
class AdamScalars(UpdateScalars):
    """What one step of Adam/AdamW multiplies, adds and divides by.

    Every float holds a binary32 value.

    decay            1 - lr * weight_decay (AdamW), or 1
    l2               weight_decay (Adam), or 0
    lerp             1 - beta1, or that minus 1 with LERP_FROM_END
    neg_step_size    -lr / (1 - beta1^step)
    bias2_sqrt       sqrt(1 - beta2^step)
    """

    kernel: ClassVar[Kernel] = Kernel.ADAMW

    decay: float
    l2: float
    lerp: float
    beta2: float
    one_minus_beta2: float
    neg_step_size: float
    bias2_sqrt: float
    eps: float

    def update_(
        self, grad: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor], out: torch.Tensor | None = None
    ) -> None:
        """`adamw_`."""
        adamw_(grad, master, states, self, out)

    @classmethod
    def of(
        cls, group: Mapping[str, object], step: float, *, decoupled: bool, torch_cuda: bool, factors: tuple[float, ...] = ()
    ) -> AdamScalars:
        """The scalars of step `step` (1 for the first) from a param_group of torch.optim.Adam or
        AdamW.

        Computed as torch.optim does: in double, each rounded to binary32 where it meets a tensor.
        decoupled    AdamW's weight decay, else Adam's
        torch_cuda   the TORCH_CUDA form
        Hyper-parameters may be tensors of one element (read here: waits for their device). What is
        made of one is then computed in its dtype, as with foreach=False; fused=True reads numbers.
        Raises UnsupportedError for hyper-parameters that are missing or not numbers, a beta1
        outside [0, 1) or more than MAX_FACTORS factors.
        """
        one, two = (number, pair) if group.get("fused") else (coefficient, coefficients)
        lr, eps, weight_decay = (one(group, key) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = two(group, "betas")
        if not 0.0 <= beta1 < 1.0:
            raise UnsupportedError(f"beta1 is {beta1}; Adam needs 0 <= beta1 < 1")
        if len(factors) > MAX_FACTORS:
            raise UnsupportedError(f"{len(factors)} multiplications of one gradient, at most {MAX_FACTORS} fit: apply them first")
        key = rounding_key(group, step)
        try:
            return cls._computed(group, step, lr, beta1, beta2, eps, weight_decay, decoupled, torch_cuda, factors, key)
        except (OverflowError, TypeError) as error:  # a float's limit; a complex number
            options = f"lr={lr}, betas={(beta1, beta2)}, eps={eps}, weight_decay={weight_decay}"
            raise UnsupportedError(f"no step can be computed from {options}: {error}") from error

    @classmethod
    def _computed(
        cls, group: Mapping[str, object], step: float, lr: Coefficient, beta1: Coefficient, beta2: Coefficient, eps: Coefficient,
        weight_decay: Coefficient, decoupled: bool, torch_cuda: bool, factors: tuple[float, ...], key: int,
    ) -> AdamScalars:
        # A beta1 in a tensor has the parameter's dtype for this in torch, and its own for the rest.
        lerp = f32(1 - (beta1.float() if isinstance(beta1, torch.Tensor) else beta1))
        from_end = lerp >= 0.5
        # Both are exact. For beta1 = 0 they are zeros of other signs, and so is m where g is -0 (of
        # torch's CPU kernel in whole vectors).
        less_one = -(1.0 - lerp) if torch_cuda else lerp - 1.0
        l2 = bool(weight_decay != 0) and not decoupled
        switches = (
            (UpdateFlag.MAXIMIZE, group.get("maximize")),
            (UpdateFlag.AMSGRAD, group.get("amsgrad")),
            (UpdateFlag.L2, l2),
            (UpdateFlag.LERP_FROM_END, from_end),
            (UpdateFlag.TORCH_CUDA, torch_cuda),
        )
        return cls(
            decay=f32(1 - lr * weight_decay) if weight_decay != 0 and decoupled else 1.0,
            l2=f32(weight_decay) if l2 else 0.0,
            lerp=less_one if from_end else lerp,
            beta2=f32(beta2),
            one_minus_beta2=f32(1 - beta2),
            neg_step_size=f32(-(lr / (1 - beta1**step))),
            bias2_sqrt=f32((1 - beta2**step) ** 0.5),
            eps=f32(eps),
            flags=sum(int(flag) for flag, on in switches if on),
            factors=tuple(f32(factor) for factor in factors),
            rounding_key=key,
        )


AT_REST: Final = AdamScalars(1.0, l2=0.0, lerp=0.0, beta2=1.0, one_minus_beta2=0.0, neg_step_size=0.0, bias2_sqrt=1.0, eps=1.0, flags=0)
"""The scalars of a step that changes nothing, for rows that another optimizer updates."""


# Parameters of one pass on a CPU. The system hands out pages for larger temporaries each time again
# (4.5 M at once: 154 ns a parameter, 28 so).
_BLOCK_PARAMS = 256 << 10


def adamw_(
    grad: torch.Tensor,  # [n] (or any shape, all the same) fp32, bf16 or fp16
    master: torch.Tensor,  # [n] fp32, in place
    # [n] each, in place: ir/states.py's ADAMW, the last with AMSGRAD
    states: Sequence[torch.Tensor],
    scalars: AdamScalars,
    # [n] new weight, rounded to nearest even; may be grad's memory
    out: torch.Tensor | None = None,
) -> None:
    """One step, one torch op per rounding, on any device.

    The readable and slow form of csrc/adamw.h, with the same bits.
    """
    if grad.device.type != "cpu" or grad.dim() != 1:
        return _adamw_block(grad, master, states, scalars, out)
    for begin in range(0, grad.numel(), _BLOCK_PARAMS):
        block = slice(begin, begin + _BLOCK_PARAMS)
        _adamw_block(grad[block], master[block], [state[block] for state in states], scalars, None if out is None else out[block])


def _adamw_block(
    grad: torch.Tensor,
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    scalars: AdamScalars,
    out: torch.Tensor | None,
) -> None:
    (m, v, *largest), s, flags = states, scalars, UpdateFlag(scalars.flags)
    g = read_gradient(grad, s)
    master.mul_(s.decay)
    if UpdateFlag.L2 in flags:
        g = fma(_like(s.l2, g), master, g)
    m.copy_(fma(_like(s.lerp, g), g - m, g if UpdateFlag.LERP_FROM_END in flags else m))
    first, second = (s.one_minus_beta2, g * g) if UpdateFlag.TORCH_CUDA in flags else (g * s.one_minus_beta2, g)
    v.copy_(fma(_like(first, g), second, v * s.beta2))
    used = v
    if UpdateFlag.AMSGRAD in flags:
        if not largest:
            raise ValueError(f"AMSGRAD is set but there is no third state; pass that of {ADAMW.names[2]}")
        used = torch.maximum(largest[0], v, out=largest[0])
    denominator = square_root(used).div_(_like(s.bias2_sqrt, g)).add_(s.eps)
    if UpdateFlag.TORCH_CUDA in flags:
        master.copy_(fma(_like(s.neg_step_size, g), m / denominator, master))
    else:
        master.add_((m * s.neg_step_size).div_(denominator))
    if out is not None:
        out.copy_(master)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c rounded once to binary32, on any device and any torch version, for fp32 tensors.

    The product is exact in double. The sum is rounded to odd there (Boldo and Melquiond, IEEE
    Trans. Computers 57(4), 2008), which makes the second rounding, to binary32, the right one.
    torch has no fma: addcmul is one on some devices and versions only.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    addend_part = total - product
    error = total - addend_part
    error = torch.sub(product, error, out=error).add_(addend - addend_part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    inexact_even = (error.abs_() > 0) & ((bits & 1) == 0)  # an infinite total has no error that is a number
    odd = bits + torch.where(away, 1, -1) * inexact_even
    return odd.view(torch.float64).float()


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root of an fp32 tensor.

    On the CPU torch's fp32 root is not; its double one is near enough to round right.
    """
    return x.double().sqrt_().float()


def _like(value: float | torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor on the device: CUDA divides by a host scalar through its reciprocal."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float32, device=tensor.device)
