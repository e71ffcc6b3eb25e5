"""The public surface is what `__all__` says, sorted, and every error has a class of its own."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

import hytrain_fx
from hytrain_fx import Config, errors

FUNCTIONS = [
    "clip_grad_norm_", "close", "compile", "explain", "from_init", "from_safetensors", "from_torch", "graph_pass", "inspect", "metrics",
    "on_meta", "record", "settle", "stages_timeline", "tie_weights",
]
ERRORS = {
    "CaptureError", "ConfigError", "DroppedNodeError", "EngineError", "GradientConsumedError", "GraphInvariantError", "HostMemoryError",
    "HytrainError", "NonFiniteGradientError", "PlanError", "RankError", "StatesError", "UnsupportedError",
}


def test_the_surface_is_sorted_and_complete() -> None:
    """`__all__` holds the passes, two value classes, a warning, an optimizer, 15 functions.

    `dir` shows them before they are loaded, and the version.
    """
    assert hytrain_fx.__all__ == ["DEFAULT_PASSES", "Config", "HytrainWarning", "Lion", "Plan", *FUNCTIONS]
    assert dir(hytrain_fx) == sorted([*hytrain_fx.__all__, "__version__"])


def test_the_version_is_the_distributions() -> None:
    """What is installed says the same."""
    assert metadata.version("hytrain_fx") == hytrain_fx.__version__


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the functions need torch")
def test_compile_spells_out_every_option() -> None:
    """With the types and defaults of `Config`, and a line of its docstring each."""
    given = {name: p for name, p in inspect.signature(hytrain_fx.compile).parameters.items() if p.kind is p.KEYWORD_ONLY}
    told = {line.split()[0] for line in (hytrain_fx.compile.__doc__ or "").splitlines() if line.strip()}
    assert list(given) == [option.name for option in fields(Config)]
    assert set(given) <= told
    for option in fields(Config):
        if option.name != "options":  # not a dict that all calls share
            assert given[option.name].default == option.default
            assert given[option.name].annotation == option.type


def test_every_error_is_a_hytrain_error() -> None:
    """All error classes are in `hytrain_fx.errors` and share one base; so does the one warning."""
    found = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"HytrainWarning"}
    assert found == ERRORS
    assert all(issubclass(getattr(errors, name), errors.HytrainError) for name in found)


def test_every_warning_has_our_category() -> None:
    """One filter on `HytrainWarning` is enough: no `warnings.warn` of the package is without it."""
    calls = [(file.name, node) for file in Path(hytrain_fx.__file__).parent.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"]
    assert calls
    assert [name for name, call in calls if "HytrainWarning" not in map(ast.unparse, call.args)] == []
    assert issubclass(hytrain_fx.HytrainWarning, UserWarning)


def test_the_log_is_silent_until_it_is_asked_for() -> None:
    """Without a set-up of logging nothing goes to stderr, not even a warning."""
    code = "import hytrain_fx, logging; logging.getLogger('hytrain_fx').warning('told')"
    asked = f"import logging; logging.basicConfig(); {code}"
    told = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stderr for text in (code, asked)]
    assert told == ["", "WARNING:hytrain_fx:told\n"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt function gives Python's own error."""
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        hytrain_fx.explian  # noqa: B018


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the functions need torch")
@pytest.mark.parametrize("first", ["hytrain_fx.explain.plan.text", "hytrain_fx.explain.plan.report"])
def test_functions_are_functions_whatever_was_imported_before(first: str) -> None:
    """`hytrain_fx.explain` is the function, also after its package's modules were imported."""
    code = f"import {first}, hytrain_fx, types; print(all(type(getattr(hytrain_fx, n)) is types.FunctionType for n in {FUNCTIONS}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"
