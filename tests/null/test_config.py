"""Options are checked when they are given."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, HytrainError
from hytrain_fx.ir.plan import Plan

EMPTY_PLAN = Plan((), 0, "test")


def test_defaults_are_accepted_and_fixed() -> None:
    """The defaults pass their own checks, and a Config does not change."""
    config = Config()
    assert (config.k, config.gpu_states, config.stream, config.planner, config.replan_every) == ("auto", "auto", "auto", "windowed", 20)
    with pytest.raises(FrozenInstanceError):
        config.k = 3  # type: ignore[misc]


@pytest.mark.parametrize("options", [
    {"k": 0}, {"k": 12}, {"plan": EMPTY_PLAN}, {"planner": "windowed"}, {"gpu_states": 0.25}, {"gpu_states": 0}, {"gpu_states": 1.0},
    {"host_memory": 1}, {"replan_every": 10}, {"engine": "torch"}, {"workers": 2}, {"ring_bytes": 1 << 20}, {"timeout_s": 0.5},
    {"mode": "default"}, {"stream": "auto"}, {"stream": 0.5}, {"stream": 1}, {"speculate": True}, {"speculate": False},
    {"speculate": "auto"}, {"shadow_memory": 0}, {"dynamic": True}, {"options": {"max_autotune": False}},
    {"on_nonfinite": "skip"}, {"on_nonfinite": "raise"},
    {"autocast_copies": False}, {"autocast_copies": True}, {"timeout_s": float("inf")}, {"mode": "lite"},
    {"dump": "folder"}, {"dump": Path("folder")}, {"k": np.int64(3)}, {"k": np.uint8(3)}, {"workers": np.int32(2)},
    {"gpu_states": np.float32(0.25)}, {"gpu_states": np.int64(1000)}, {"stream": np.float16(0.5)}, {"timeout_s": np.float32(2.0)},
    {"host_memory": np.int64(1 << 40)}, {"warmup_steps": np.int64(2)},
])
def test_accepted(options: dict[str, Any]) -> None:
    """Each option takes what its description says, and keeps it."""
    config = Config.from_options(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(("name", "value"), [
    ("k", -1), ("k", "all"), ("k", True), ("k", 1.5), ("plan", {"k": 0}), ("planner", "greedy"), ("gpu_states", 1.5), ("gpu_states", -1),
    ("gpu_states", "most"), ("gpu_states", True), ("host_memory", 0), ("host_memory", 1e9), ("replan_every", -1), ("replan_every", True),
    ("warmup_steps", 0), ("engine", "cuda"), ("workers", 0), ("workers", True), ("ring_bytes", -5), ("timeout_s", 0), ("timeout_s", "long"),
    ("stream", 1.5), ("stream", -0.1), ("stream", "all"), ("stream", True), ("stream", float("nan")),
    ("mode", "reduce-overhead"), ("mode", "max-autotune"), ("speculate", "always"), ("speculate", 1), ("speculate", None),
    ("on_nonfinite", "ignore"), ("on_nonfinite", None), ("on_nonfinite", True),
    ("autocast_copies", None), ("autocast_copies", 0), ("autocast_copies", "auto"),
    ("dump", 3), ("dump", ""), ("dump", b"folder"), ("dynamic", "yes"), ("dynamic", 1), ("mode", 3), ("mode", True),
    ("options", "max_autotune"), ("options", ["max_autotune"]), ("options", {3: True}), ("options", 0), ("timeout_s", True),
    ("timeout_s", float("nan")), ("timeout_s", -1.0), ("timeout_s", None), ("timeout_s", "120"), ("shadow_memory", False),
    ("shadow_memory", -1), ("shadow_memory", 0.5), ("shadow_memory", "all"), ("host_memory", "1 GB"), ("host_memory", True),
    ("host_memory", float("nan")), ("gpu_states", float("inf")), ("gpu_states", None), ("gpu_states", [0.5]), ("k", None), ("k", [1]),
    ("k", float("nan")), ("workers", 2.0), ("workers", 5000), ("workers", "all"), ("ring_bytes", 0), ("ring_bytes", True),
    ("pin_workers", 1), ("pin_workers", "yes"), ("engine", None), ("engine", ["native"]), ("planner", None), ("planner", 1),
    ("replan_every", 2.0), ("replan_every", None), ("warmup_steps", True), ("warmup_steps", "5"), ("stream", None), ("k", np.bool_(True)),
    *((name, 1 << 70) for name in ("host_memory", "shadow_memory", "ring_bytes")),
    *((name, np.array([1, 2])) for name in ("k", "planner", "stream", "gpu_states", "host_memory", "speculate", "shadow_memory", "engine",
                                            "workers", "timeout_s", "mode", "options", "dynamic", "dump", "ring_bytes")),
])
def test_refused(name: str, value: object) -> None:
    """A wrong type or range is an error that names the option and what was found.

    It is a ValueError and one of our errors.
    """
    with pytest.raises(ConfigError, match=f"option {name}=") as caught:
        Config.from_options(**{name: value})
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HytrainError)


@given(fraction=st.floats())
def test_fractions_of_the_states(fraction: float) -> None:
    """A float is a fraction: 0..1 is accepted, anything else, nan included, is not."""
    if 0.0 <= fraction <= 1.0:
        assert Config(gpu_states=fraction).gpu_states == fraction
    else:
        with pytest.raises(ConfigError):
            Config(gpu_states=fraction)


def test_plan_and_k_exclude_each_other() -> None:
    """A plan already fixes k, so giving both is an error."""
    with pytest.raises(ConfigError, match="a plan already fixes k"):
        Config(plan=EMPTY_PLAN, k=2)


def test_mode_and_options_exclude_each_other() -> None:
    """A mode stands for Inductor options, so giving both is an error, as in torch.compile."""
    with pytest.raises(ConfigError, match="one of the two"):
        Config(mode="default", options={"max_autotune": True})


def test_numbers_of_numpy_become_plain_ones() -> None:
    """A Config is printed, saved and handed to C, so its numbers are plain ints and floats."""
    config = Config.from_options(k=np.int64(3), gpu_states=np.float64(0.5), timeout_s=np.float32(2.0))
    assert [type(value) for value in (config.k, config.gpu_states, config.timeout_s)] == [int, float, float]
    assert Config(timeout_s=10**400).timeout_s == float("inf")  # more than a float holds


def test_options_are_a_copy() -> None:
    """The given dict may be changed afterwards; None says no options, as in torch.compile."""
    given = {"max_autotune": True}
    config = Config.from_options(options=given)
    given.clear()
    assert config.options == {"max_autotune": True}
    assert Config.from_options(options=None).options == {}


def test_unknown_names_are_refused() -> None:
    """A misspelt option is an error that lists the options."""
    with pytest.raises(ConfigError, match=r"unknown option 'gpu_state'; the options are .*gpu_states"):
        Config.from_options(gpu_state=0.5)


def test_every_option_is_described() -> None:
    """The docstring describes each option on a line of its own."""
    described = {line.split()[0] for line in (Config.__doc__ or "").splitlines() if line.startswith("    ") and line.split()}
    assert {f.name for f in fields(Config)} <= described
