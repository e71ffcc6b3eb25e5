"""Lion: the optimizer, and the same step on fp32 masters.

From Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

One state a parameter. Each operation of the step is one of torch's that rounds once, and none is
fused, so it has the same bits on every device; csrc/lion.h and csrc/update_rows.cu write the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hytrain_fx.ir.states import Kernel
from hytrain_fx.runtime.rounding import rounding_key
from hytrain_fx.runtime.scalars import UpdateScalars, f32, number, pair, read_gradient


class Lion(torch.optim.Optimizer):
    """Moves each weight by `lr`, along the sign of an average of gradients.

    Weight decay is decoupled.

    lr             length of a step, 3 to 10 times less than AdamW's
    betas          of the average whose sign is taken, and of the one that is kept
    weight_decay   3 to 10 times AdamW's

    Like torch's classes it keeps its states in the parameters' dtype; compiled, masters and states
    of 16-bit parameters are fp32. Raises ValueError for options out of range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"found lr={lr}, betas={betas}, weight_decay={weight_decay}; expected 0 <= lr, weight_decay and 0 <= beta < 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; gives the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            scalars = LionScalars.of(group)
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), exp_avg=torch.zeros_like(parameter))
                state["step"] += 1
                _step(parameter, parameter.grad, state["exp_avg"], scalars)
        return loss


@dataclass(frozen=True, slots=True)
class LionScalars(UpdateScalars):
    """What one step of Lion multiplies and adds.

    `lerp` is 1 - beta1, `neg_step_size` is -lr, `decay` is 1 - lr * weight_decay.
    """

    kernel: ClassVar[Kernel] = Kernel.LION

    decay: float
    beta1: float
    lerp: float
    beta2: float
    one_minus_beta2: float
    neg_step_size: float

    @classmethod
    def of(cls, group: Mapping[str, object], step: float = 1, factors: tuple[float, ...] = ()) -> LionScalars:
        """From a group's options, computed in double. Of `step` only moments in bf16 know.

        Raises UnsupportedError for options that are missing or no numbers.
        """
        lr, weight_decay, (beta1, beta2) = number(group, "lr"), number(group, "weight_decay"), pair(group, "betas")
        numbers = map(f32, (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr))
        return cls(*numbers, factors=factors, rounding_key=rounding_key(group, step))

    def update_(
        self, grad: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor], out: torch.Tensor | None = None
    ) -> None:
        """Like the class's step."""
        _step(master, read_gradient(grad, self), states[0], self)
        if out is not None:
            out.copy_(master)


def _step(weight: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, s: LionScalars) -> None:
    direction = exp_avg.mul(s.beta1).add_(grad.mul(s.lerp))
    weight.mul_(s.decay).add_(direction.sign_().mul_(s.neg_step_size))
    exp_avg.mul_(s.beta2).add_(grad.mul(s.one_minus_beta2))
