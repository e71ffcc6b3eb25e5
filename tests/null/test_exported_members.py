"""The public surface is what `__all__` says, sorted, and every error has a class of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import hytrain_fx
from hytrain_fx import errors

FUNCTIONS = ["close", "compile", "explain", "inspect", "record", "settle"]
ERRORS = {
    "CaptureError", "ConfigError", "DroppedNodeError", "EngineError", "GradientConsumedError", "GraphInvariantError", "HostMemoryError",
    "HytrainError", "NonFiniteGradientError", "PlanError", "StatesError", "UnsupportedError",
}


def test_the_surface_is_sorted_and_complete() -> None:
    """`__all__` holds the two value classes and the six functions; `dir` shows them before they are loaded."""
    assert hytrain_fx.__all__ == ["Config", "Plan", *FUNCTIONS]
    assert set(hytrain_fx.__all__) <= set(dir(hytrain_fx))


def test_every_error_is_a_hytrain_error() -> None:
    """All error classes are in `hytrain_fx.errors` and share one base."""
    found = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert found == ERRORS
    assert all(issubclass(getattr(errors, name), errors.HytrainError) for name in found)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt function is told as Python tells it."""
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        hytrain_fx.explian  # noqa: B018


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the functions need torch")
@pytest.mark.parametrize("first", ["hytrain_fx.explain.plan.text", "hytrain_fx.explain.plan.report"])
def test_functions_are_functions_whatever_was_imported_before(first: str) -> None:
    """`hytrain_fx.explain` is the function, also after modules of the package of the same name were imported."""
    code = f"import {first}, hytrain_fx, types; print(all(type(getattr(hytrain_fx, n)) is types.FunctionType for n in {FUNCTIONS}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"
