"""HyTrainDNN's balance: the first k layers are updated on the device so that both sides end
together.

    t_bwd + t_upd_gpu(k) = t_upd_cpu(n) - t_upd_cpu(k)             alpha = t_upd_gpu / t_upd_cpu

Equal layers give a closed form (sympy states and solves it). Unequal layers need only prefix sums:
with A_k = sum_{l<k} gpu_l, C_k = sum_{l<k} cpu_l, C = C_n,

    phi(k)   = t_bwd + A_k - (C - C_k)          grows with k: one crossing
    T_upd(k) = max(t_bwd + A_k, C - C_k)        smallest at the crossing: the better neighbour

CoTrain's separation distance is the same equation with alpha = 1.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hytrain_fx.errors import PlanError


@dataclass(frozen=True)
class UniformEquation:
    """The equation for n equal layers, in sympy.

    `balance` is the Eq; `k` its solution in the positive symbols `n`, `t_bwd`, `t_cpu` (the CPU's
    update of all layers) and `alpha`; `sensitivities` maps "t_bwd", "t_cpu", "alpha" to dk/d(that);
    `evaluate(n, t_bwd, t_cpu, alpha)` is `k` as a function.
    """

    balance: Any
    k: Any
    symbols: tuple[Any, Any, Any, Any]
    sensitivities: dict[str, Any]
    evaluate: Callable[[float, float, float, float], float]
    evaluate_sensitivity: dict[str, Callable[[float, float, float, float], float]]


@functools.cache
def uniform_equation() -> UniformEquation:
    """State the equation, solve it for k and differentiate the solution.

    About 0.3 s the first time: sympy is imported here.
    """
    import sympy

    symbols = n, t_bwd, t_cpu, alpha = sympy.symbols("n t_bwd t_cpu alpha", positive=True)
    k = sympy.Symbol("k", real=True)
    cpu_of_first_k = t_cpu * k / n
    balance = sympy.Eq(t_bwd + alpha * cpu_of_first_k, t_cpu - cpu_of_first_k)
    (solution,) = sympy.solve(balance, k)
    solution = sympy.simplify(solution)
    sensitivities = {str(s): sympy.simplify(sympy.diff(solution, s)) for s in (t_bwd, t_cpu, alpha)}
    functions = {name: sympy.lambdify(symbols, expression, "math") for name, expression in sensitivities.items()}
    return UniformEquation(balance, solution, symbols, sensitivities, sympy.lambdify(symbols, solution, "math"), functions)


def uniform_k(n: int, t_bwd_us: float, t_cpu_us: float, alpha: float) -> float:
    """The closed form for n equal layers, as a real number in 0..n.

    0 when the backward hides every CPU update.
    """
    if t_bwd_us >= t_cpu_us:
        return 0.0
    if t_bwd_us <= 0.0:  # the symbols are positive; the limit is the same formula
        return n / (1.0 + alpha)
    return min(max(uniform_equation().evaluate(n, t_bwd_us, t_cpu_us, alpha), 0.0), float(n))


def uniform_sensitivities(n: int, t_bwd_us: float, t_cpu_us: float, alpha: float) -> dict[str, float]:
    """dk/dt_bwd and dk/dt_cpu (layers per microsecond) and dk/dalpha (layers) at this point.

    All are 0 where k = 0.
    """
    functions = uniform_equation().evaluate_sensitivity
    if t_bwd_us >= t_cpu_us:
        return dict.fromkeys(functions, 0.0)
    return {name: float(function(n, t_bwd_us, t_cpu_us, alpha)) for name, function in functions.items()}


@dataclass(frozen=True)
class Balance:
    """The equation for unequal layers; `cpu_us[l]` and `gpu_us[l]` are the two times of layer l.

    Raises PlanError when the two differ in length or a time is negative or not finite.
    """

    t_bwd_us: float
    cpu_us: tuple[float, ...]
    gpu_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.cpu_us) != len(self.gpu_us) or not self.cpu_us:
            raise PlanError(f"found {len(self.cpu_us)} CPU and {len(self.gpu_us)} device update times, expected one of each per layer")
        times = (self.t_bwd_us, *self.cpu_us, *self.gpu_us)
        if any(not math.isfinite(t) or t < 0 for t in times):
            raise PlanError(f"found update or backward times that are negative or not finite: {times}")

    @property
    def n(self) -> int:
        """Number of layers."""
        return len(self.cpu_us)

    def gpu_side_us(self, k: int) -> float:
        """t_bwd + A_k: when the device has finished its first k updates."""
        return self.t_bwd_us + self._gpu_prefix[k]

    def cpu_side_us(self, k: int) -> float:
        """C - C_k: how long the CPU works on the other layers; exactly 0 for k = n."""
        return self._cpu_suffix[k]

    def phi_us(self, k: int) -> float:
        """Device side less CPU side; grows with k."""
        return self.gpu_side_us(k) - self.cpu_side_us(k)

    def update_us(self, k: int) -> float:
        """T_upd(k): from the start of the backward until every layer is updated."""
        return max(self.gpu_side_us(k), self.cpu_side_us(k))

    def solve(self) -> int:
        """The k in 0..n with the smallest T_upd, the smaller one on a tie.

        It is found by a binary search for the first phi >= 0.
        """
        crossing = bisect_left(range(self.n + 1), 0.0, key=self.phi_us)
        return cheapest(min(crossing, self.n), self.update_us)

    @functools.cached_property
    def _gpu_prefix(self) -> list[float]:
        return list(accumulate(self.gpu_us, initial=0.0))

    @functools.cached_property
    def _cpu_suffix(self) -> list[float]:
        return list(accumulate(reversed(self.cpu_us), initial=0.0))[::-1]


def cheapest(crossing: int, cost_us: Callable[[int], float]) -> int:
    """Where a cost that does not rise before `crossing` and does not fall after it is least.

    Of equals the first, which needs the least device memory.
    """
    best = min(range(max(crossing - 1, 0), crossing + 1), key=cost_us)
    least_us = cost_us(best)
    return bisect_left(range(best), True, key=lambda k: cost_us(k) <= least_us)
