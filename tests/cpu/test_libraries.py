"""Which library is loaded: the wheel's best for this CPU and this text, else one built here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.forecast import doctor
from hytrain_fx.forecast.doctor import State
from hytrain_fx.runtime.native import build, libraries
from hytrain_fx.runtime.native.libraries import BASELINES, BUILT_HERE, PREBUILT, SHIPPED

SOURCES = ("answer.cpp",)
V4, V3 = BASELINES


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ with one small source, brought by a wheel for every baseline, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return kAnswer; }\n')
    monkeypatch.setattr(build, "CSRC", folder)
    monkeypatch.setattr(libraries, "SHIPPED", (SOURCES,))
    monkeypatch.setattr(libraries, "SOURCES", SOURCES)
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "of the wheel's maker"))
    libraries.build_ahead(tmp_path / "prebuilt")
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "cache"))
    return folder


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def on_cpu_with(monkeypatch: pytest.MonkeyPatch, instruction_sets: frozenset[str]) -> None:
    monkeypatch.setattr(build, "instruction_sets", lambda: instruction_sets)


@pytest.mark.parametrize(("has", "origin"), [
    (V4.needs | {"amx_bf16"}, "wheel, x86-64-v4"),
    (V4.needs - {"avx512vl"}, "wheel, x86-64-v3"),
    (V3.needs, "wheel, x86-64-v3"),
    (V3.needs - {"fma"}, BUILT_HERE),
    (frozenset[str](), BUILT_HERE),
], ids=["above v4", "part of v4", "v3", "part of v3", "not known"])
def test_the_best_that_the_cpu_can_run_is_taken(csrc: Path, monkeypatch: pytest.MonkeyPatch, has: frozenset[str], origin: str) -> None:
    """A CPU that has a part of a level only gets the one below it."""
    on_cpu_with(monkeypatch, has)
    assert libraries.library(SOURCES).origin == origin


def test_no_compiler_is_needed_for_what_the_wheel_brought(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before anything was built, and its code runs. Nothing lands in the cache."""
    if not V3.needs <= build.instruction_sets():
        pytest.skip("this CPU is older than the wheel's")
    without_compiler(monkeypatch)
    there = libraries.existing(SOURCES)
    assert there == libraries.library(SOURCES)
    assert there is not None
    assert there.load().answer() == 42
    assert not build.cache_dir().joinpath(there.path.name).exists()


@pytest.mark.parametrize("changed", ["source", "header", "limits"])
def test_what_was_made_of_another_text_is_not_taken(csrc: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """It is built here from the text that is here; without a compiler that is an error."""
    on_cpu_with(monkeypatch, V4.needs)
    if changed == "limits":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DHYTRAIN_FX_CHUNK_PARAMS=1"))
    else:
        with (csrc / ("answer.cpp" if changed == "source" else "answer.h")).open("a") as file:
            file.write("// changed\n")
    assert libraries.existing(SOURCES) is None
    assert libraries.library(SOURCES) == libraries.existing(SOURCES) == libraries.Library(build.path_of(SOURCES), BUILT_HERE)
    without_compiler(monkeypatch)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler"):
        libraries.library(SOURCES)


def test_a_source_checkout_builds_for_its_own_cpu() -> None:
    """It has nothing prebuilt, whatever was built from it."""
    assert not PREBUILT.exists()
    found = libraries.library(libraries.KERNEL_SOURCES)
    assert found == libraries.Library(build.library(libraries.KERNEL_SOURCES), BUILT_HERE)
    assert "-march=native" in build.FLAGS


def test_every_source_of_the_engine_is_shipped() -> None:
    """All but those that need torch's headers."""
    of_torch = {"op_reads.cpp", "storage_memory.cpp"}
    shipped = [source for sources in SHIPPED for source in sources]
    assert sorted(shipped) == sorted(path.name for path in build.CSRC.glob("*.cpp") if path.name not in of_torch)


def test_doctor_says_which_library_it_is(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the engine is there, and what is missing is torch.compile's."""
    if not V3.needs <= build.instruction_sets():
        pytest.skip("this CPU is older than the wheel's")
    on_cpu_with(monkeypatch, V3.needs)
    without_compiler(monkeypatch)
    found = {of.what: of for of in doctor._engine(torch.device("cpu"))}
    assert (found["native engine"].found, found["native engine"].state) == ("wheel, x86-64-v3, and it loads", State.GOOD)
    assert found["C++ compiler"].is_bad
    assert 'options={"fallback_by_default": True}' in found["C++ compiler"].meaning
