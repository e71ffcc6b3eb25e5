"""`hytrain-fx doctor`: what it finds, what it tells to do, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hytrain_fx.__main__ import main
from hytrain_fx.forecast import doctor
from hytrain_fx.forecast.doctor import State, examine
from hytrain_fx.forecast.doctor_table import findings_text
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import SOURCES


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured for a moment only."""
    monkeypatch.setattr(doctor, "_HOST_SECONDS", 0.01)


def asked(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]], bool]:
    """Exit status, findings by what they are of, and whether it says that training would work."""
    status = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    return status, {found["what"]: found for found in told["findings"]}, told["works"]


def test_a_machine_that_can_train_is_found_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Each finding says what was found and what it means; the exit status is 0."""
    build.library(SOURCES)
    status, found, works = asked(capsys)
    assert (status, works) == (0, True)
    assert {"torch", "C++ compiler", "native engine", "cache folder", "CPU", "host memory", "its bandwidth", "GPU",
            "pinned memory"} <= set(found)
    assert all(of["found"] and of["meaning"] for of in found.values())
    assert found["torch"]["found"] == torch.__version__
    assert found["native engine"]["state"] == "ok"


def test_without_a_compiler_the_status_is_1_and_the_line_to_run_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other things are looked at all the same."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, found, works = asked(capsys)
    assert (status, works) == (1, False)
    assert (found["C++ compiler"]["state"], found["C++ compiler"]["todo"]) == ("bad", "apt install g++")
    assert "host memory" in found
    assert main(["doctor"]) == 1
    assert "would not work here. To do:\n    C++ compiler: apt install g++" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "state", "todo"), [
    ("2.9.1", "bad", 'pip install --upgrade "torch>=2.11"'),
    ("2.99.0", "note", "./scripts/test"),
    ("2.13.0+cpu", "ok", None),
])
def test_torch_is_told_too_old_untried_or_tried(version: str, state: str, todo: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that is too old means that training would not work."""
    monkeypatch.setattr(torch, "__version__", version)
    found = next(iter(doctor._torch(torch.device("cpu"))))
    assert (found.state, found.todo, found.is_bad) == (state, todo, state == "bad")


def test_a_cache_that_cannot_be_written_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line to write names the variable."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "file"))
    status, found, _ = asked(capsys)
    assert status == 1
    assert found["cache folder"]["todo"].startswith("export HYTRAIN_FX_CACHE=")


def test_an_engine_that_is_not_built_yet_is_tried_in_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One small file compiles, the engine does not; training would work."""
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))
    status, found, _ = asked(capsys)
    assert status == 0
    assert (found["native engine"]["state"], found["native engine"]["todo"]) == ("note", "hytrain-fx build")
    assert [path.stem.partition("-")[0] for path in tmp_path.iterdir()] == ["step_clock"]


def test_a_compiler_that_fails_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is there, and refuses every file."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho refused >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "cache"))
    status, found, _ = asked(capsys)
    assert status == 1
    assert found["C++ compiler"]["state"] == "ok"
    assert f"{compiler} failed on step_clock.cpp" in found["native engine"]["found"]


def test_what_cannot_be_looked_at_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one look is told, and the next ones are made."""
    def broken(_device: torch.device) -> Iterator[doctor.Finding]:
        yield doctor.Finding("CPU", f"{1 // 0} logical CPUs", "never told")

    monkeypatch.setattr(doctor, "_cores", broken)
    told: list[str] = []
    found = {of.what: of for of in examine(told.append)}
    assert (found["CPU"].state, found["CPU"].found) == (State.BAD, "ZeroDivisionError: integer division or modulo by zero")
    assert "host memory" in found
    assert told[0] == "looking at: torch"
    assert "would not work" in findings_text(tuple(found.values()))
