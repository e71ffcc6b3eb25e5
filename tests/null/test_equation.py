"""The balance t_bwd + t_upd_gpu(k) = t_upd_cpu(n) - t_upd_cpu(k), equal and unequal layers."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx import errors
from hytrain_fx.cost_model.equation import Balance, uniform_equation, uniform_k, uniform_sensitivities
from hytrain_fx.errors import PlanError
from tests.null.profiles import TIMES, WORK

PACKAGE = Path(errors.__file__).parent
LAYERS = st.lists(st.tuples(WORK, TIMES), min_size=1, max_size=12)


def balance(t_bwd: float, layers: list[tuple[float, float]]) -> Balance:
    return Balance(t_bwd, tuple(cpu for cpu, _ in layers), tuple(gpu for _, gpu in layers))


def test_uniform_closed_form() -> None:
    """For equal layers k = n (t_cpu - t_bwd) / (t_cpu (1 + alpha))."""
    assert uniform_k(12, 60.0, 120.0, 0.5) == pytest.approx(4.0)
    n, t_bwd, t_cpu, alpha = uniform_equation().symbols
    assert (uniform_equation().k - n * (t_cpu - t_bwd) / (t_cpu * (1 + alpha))).simplify() == 0


@given(n=st.integers(1, 100), t_bwd=st.floats(1, 1e6), more=st.floats(1.001, 50), alpha=st.floats(0.001, 3))
def test_closed_form_solves_the_equation(n: int, t_bwd: float, more: float, alpha: float) -> None:
    """Put back into the equation, the closed form balances both sides."""
    t_cpu = more * t_bwd
    k = uniform_k(n, t_bwd, t_cpu, alpha)
    assert t_bwd + alpha * t_cpu * k / n == pytest.approx(t_cpu - t_cpu * k / n)


@given(n=st.integers(1, 40), cpu=WORK, t_bwd=st.floats(0, 5000), alpha=st.floats(0.0, 3))
def test_discrete_is_a_neighbour_of_the_closed_form(n: int, cpu: float, t_bwd: float, alpha: float) -> None:
    """On equal layers the discrete k is the floor or the ceiling of the closed form.

    It is the better of the two.
    """
    exact = uniform_k(n, t_bwd, n * cpu, alpha)
    b = balance(t_bwd, [(cpu, alpha * cpu)] * n)
    assert abs(b.solve() - exact) < 1 + 1e-9
    assert b.update_us(b.solve()) == pytest.approx(min(b.update_us(k) for k in range(n + 1)))


def test_discrete_equals_the_closed_form_where_that_is_whole() -> None:
    """When the balance falls between two layers exactly, both forms give that k."""
    assert balance(60.0, [(10.0, 5.0)] * 12).solve() == 4 == uniform_k(12, 60.0, 120.0, 0.5)


@given(t_bwd=TIMES, layers=LAYERS)
def test_phi_grows_and_solution_is_best(t_bwd: float, layers: list[tuple[float, float]]) -> None:
    """phi grows with k, and the solution has the smallest T_upd of all k, the smallest such k."""
    b = balance(t_bwd, layers)
    phis = [b.phi_us(k) for k in range(b.n + 1)]
    assert all(after > before for before, after in pairwise(phis))
    costs = [b.update_us(k) for k in range(b.n + 1)]
    assert b.solve() == costs.index(min(costs))


@given(t_bwd=TIMES, more=WORK, layers=LAYERS)
def test_k_falls_with_longer_backward(t_bwd: float, more: float, layers: list[tuple[float, float]]) -> None:
    """A longer backward hides more CPU updates: k does not grow."""
    assert balance(t_bwd + more, layers).solve() <= balance(t_bwd, layers).solve()


@given(t_bwd=TIMES, factor=st.integers(2, 5), n=st.integers(1, 30), cpu=WORK, gpu=TIMES)
def test_k_grows_with_slower_cpu(t_bwd: float, factor: int, n: int, cpu: float, gpu: float) -> None:
    """With equal layers, a slower CPU never gives fewer layers to the device.

    Update times on the device stay the same.
    """
    assert balance(t_bwd, [(factor * cpu, gpu)] * n).solve() >= balance(t_bwd, [(cpu, gpu)] * n).solve()


@given(layers=LAYERS)
def test_long_backward_gives_zero(layers: list[tuple[float, float]]) -> None:
    """A backward at least as long as all CPU updates gives k = 0, in both forms."""
    total = sum(cpu for cpu, _ in layers)
    assert balance(total, layers).solve() == 0
    assert uniform_k(len(layers), total, total, 0.1) == 0.0
    assert set(uniform_sensitivities(len(layers), total, total, 0.1).values()) == {0.0}


def test_alpha_one_is_cotrain() -> None:
    """alpha = 1 gives n (t_upd - t_bwd) / (2 t_upd): CoTrain's separation distance."""
    assert uniform_k(10, 20.0, 100.0, 1.0) == pytest.approx(10 * (100 - 20) / (2 * 100))
    assert balance(20.0, [(10.0, 10.0)] * 10).solve() == 4


@given(n=st.integers(1, 50), t_bwd=st.floats(1, 1e4), more=st.floats(1.2, 20), alpha=st.floats(0.01, 2))
def test_sensitivities_are_the_slopes(n: int, t_bwd: float, more: float, alpha: float) -> None:
    """Each sensitivity is the slope of k that central differences find."""
    point = {"t_bwd": t_bwd, "t_cpu": more * t_bwd, "alpha": alpha}
    slopes = uniform_sensitivities(n, **{f"{name}_us" if name != "alpha" else name: value for name, value in point.items()})
    for name, slope in slopes.items():
        step = 1e-4 * point[name]
        up, down = ({**point, name: point[name] + sign * step} for sign in (1, -1))
        difference = uniform_k(n, up["t_bwd"], up["t_cpu"], up["alpha"]) - uniform_k(n, down["t_bwd"], down["t_cpu"], down["alpha"])
        assert slope == pytest.approx(difference / (2 * step), rel=1e-3)


def test_bad_times_are_refused() -> None:
    """Negative, infinite or missing times are errors that say what was found."""
    with pytest.raises(PlanError, match="negative or not finite"):
        Balance(-1.0, (1.0,), (1.0,))
    with pytest.raises(PlanError, match="2 CPU and 1 device"):
        Balance(1.0, (1.0, 2.0), (1.0,))


def test_sympy_is_imported_only_when_the_equation_is_stated() -> None:
    """The planning modules alone import neither sympy nor torch.

    The package's own `__init__` is left out.
    """
    code = f"""if True:
        import sys, types
        package = sys.modules["hytrain_fx"] = types.ModuleType("hytrain_fx")
        package.__path__ = [{str(PACKAGE)!r}]
        import hytrain_fx.cost_model.planner, hytrain_fx.forecast.report, hytrain_fx.cost_model.replan
        print(sorted({{"sympy", "torch"}} & set(sys.modules)))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
