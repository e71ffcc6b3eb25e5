"""The native build: its cache's key, a second process, and clear errors.

It is cached by what it depends on and says why it cannot work.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hytrain_fx.errors import EngineError
from hytrain_fx.ir import limits
from hytrain_fx.runtime.native import build

CSRC = build.CSRC


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ with one small source and one header, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return kAnswer; }\n')
    monkeypatch.setattr(build, "CSRC", folder)
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "cache"))
    return folder


def test_load_runs_the_code(csrc: Path) -> None:
    """`load` compiles and loads, and leaves only the library in the cache."""
    assert build.load(("answer.cpp",)).answer() == 42
    assert [path.suffix for path in build.cache_dir().iterdir()] == [".so"]


def test_compiling_is_told_once(csrc: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """One line with the time where it is asked for. The cache is used in silence.

    Where stderr is no terminal only the log has it.
    """
    caplog.set_level("INFO", "hytrain_fx")
    for _ in range(2):
        build.library(("answer.cpp",), tells=True)
    assert re.fullmatch(r"hytrain_fx: compiling 1 C\+\+ files, once for this machine \.\.\. \d+\.\d s\n", capsys.readouterr().err)
    (csrc / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    path = build.library(("answer.cpp",))
    assert capsys.readouterr().err == ""
    assert f"compiled 1 C++ files into {path}" in caplog.records[-1].getMessage()
    (csrc / "answer.h").write_text("broken")
    with pytest.raises(EngineError):
        build.library(("answer.cpp",), tells=True)
    assert capsys.readouterr().err.endswith("... failed\n")


def test_second_build_is_from_the_cache(csrc: Path) -> None:
    """A library already built is not compiled again."""
    first = build.library(("answer.cpp",))
    written = first.stat().st_mtime_ns
    assert build.library(("answer.cpp",)) == first
    assert first.stat().st_mtime_ns == written


@pytest.mark.parametrize("changed", ["answer.cpp", "answer.h"])
def test_changed_text_is_built_again(csrc: Path, changed: str) -> None:
    """A change of a source or of a header it may include gives another library."""
    before = build.library(("answer.cpp",))
    with (csrc / changed).open("a") as file:
        file.write("// changed\n")
    assert build.library(("answer.cpp",)) != before


def test_flags_and_cpu_are_part_of_the_name(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other flags, or another CPU over a shared home directory, give another library."""
    names = {build.library(("answer.cpp",)), build.library(("answer.cpp",), flags=(*build.FLAGS, "-DOTHER"))}
    monkeypatch.setattr(build, "_cpu", lambda: "flags: of another machine")
    names.add(build.library(("answer.cpp",)))
    assert len(names) == 3


def test_several_sources_make_one_library(csrc: Path) -> None:
    """Sources are compiled together."""
    (csrc / "twice.cpp").write_text('extern "C" int answer();\nextern "C" int twice() { return 2 * answer(); }\n')
    assert build.load(("twice.cpp", "answer.cpp")).twice() == 84


LOAD = """
import sys, types
package = types.ModuleType("hytrain_fx")  # without its __init__, which imports torch
package.__path__ = [sys.argv[1]]
sys.modules["hytrain_fx"] = package
from hytrain_fx.runtime.native import build
print(build.load(("kernels_c.cpp",)).hytrain_fx_update_chunk is not None)
"""


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Processes that build the same library together all load a whole one."""
    command = [sys.executable, "-c", LOAD, str(Path(build.__file__).parents[2])]
    environment = os.environ | {"HYTRAIN_FX_CACHE": str(tmp_path)}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=240)[0].strip() for process in processes] == ["True"] * 3
    assert len(list(tmp_path.iterdir())) == 1


def test_failing_source_is_quoted(csrc: Path) -> None:
    """A compile error names the source and carries the compiler's words, and nothing is cached."""
    (csrc / "broken.cpp").write_text("int broken( {\n")
    with pytest.raises(EngineError, match=r"(?s)failed on broken\.cpp.*engine='torch'.*error:"):
        build.library(("broken.cpp",))
    assert list(build.cache_dir().iterdir()) == []


def test_missing_compiler_says_what_to_do(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the error names those that were looked for and the way on."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(csrc))
    with pytest.raises(EngineError, match=r"g\+\+, clang\+\+.*engine='torch'"):
        build.library(("answer.cpp",))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineError, match="CXX is 'no-such-compiler'"):
        build.library(("answer.cpp",))


def test_cxx_is_the_compiler(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`$CXX` goes before the compilers that are looked for."""
    compiler = csrc / "my-compiler"
    compiler.write_text(f'#!/bin/sh\nexec {build.find_compiler()} -DFROM_MINE "$@"\n')
    compiler.chmod(0o755)
    (csrc / "mine.cpp").write_text("#ifndef FROM_MINE\n#error not mine\n#endif\n")
    monkeypatch.setenv("CXX", str(compiler))
    assert build.library(("mine.cpp",)).exists()


def test_unwritable_cache_says_what_to_do(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be made names HYTRAIN_FX_CACHE."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EngineError, match="Set HYTRAIN_FX_CACHE"):
        build.library(("answer.cpp",))


def test_a_full_disk_says_what_to_do(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was compiled and cannot be kept is an EngineError, and leaves nothing."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(EngineError, match=r"No space left.*HYTRAIN_FX_CACHE"):
            build.load(("answer.cpp",))
    assert not list(build.cache_dir().iterdir())
    assert build.load(("answer.cpp",)).answer() == 42


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_cache_serves_what_it_has(csrc: Path) -> None:
    """A read-only cache gives libraries that are in it and refuses to build others."""
    built = build.library(("answer.cpp",))
    build.cache_dir().chmod(0o555)
    try:
        assert build.library(("answer.cpp",)) == built
        with pytest.raises(EngineError, match="Set HYTRAIN_FX_CACHE"):
            build.library(("answer.cpp",), flags=(*build.FLAGS, "-DOTHER"))
    finally:
        build.cache_dir().chmod(0o755)


def test_cache_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYTRAIN_FX_CACHE, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HYTRAIN_FX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_dir() == tmp_path / "home" / ".cache" / "hytrain_fx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "hytrain_fx"
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "own"))
    assert build.cache_dir() == tmp_path / "own"


def test_publish_is_whole(tmp_path: Path) -> None:
    """A published file has all its bytes and no companion is left."""
    build.publish(b"machine code", tmp_path / "kernel.cubin")
    assert (tmp_path / "kernel.cubin").read_bytes() == b"machine code"
    assert len(list(tmp_path.iterdir())) == 1


KERNELS = """
#include "update_beside.h"
using namespace hytrain_fx;
void whole(const void* grad, float* master, const States& states, void* out, int64_t n, const UpdateScalars& scalars) {
  update_chunk(grad, Dtype::kBF16, master, states, out, Dtype::kBF16, n, scalars);
}
void halves(const void* grad, uint16_t* high, uint16_t* low, const States& states, int64_t n, const UpdateScalars& scalars) {
  update_split_chunk(grad, Dtype::kBF16, high, low, states, n, scalars);
}
void beside(const void* grad, void* master, void* kept, const HostArrays& from, const HostArrays& to, int64_t n,
            const UpdateScalars& scalars) {
  update_beside(grad, Dtype::kBF16, master, kept, from, to, n, scalars);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's instructions")
@pytest.mark.parametrize("kernel", ["update_chunk", "update_split_chunk", "update_beside"])
def test_the_kernels_fetch_ahead(kernel: str, tmp_path: Path) -> None:
    """The compiler keeps the prefetches of each kernel.

    GCC drops calls of functions that do nothing else.
    """
    source, text = tmp_path / "kernels.cpp", tmp_path / "kernels.s"
    source.write_text("\n".join(line for line in KERNELS.splitlines() if not re.match(r"  \w+\(", line) or f"  {kernel}(" in line))
    subprocess.run([build.find_compiler(), *build.FLAGS, "-w", f"-I{build.CSRC}", "-S", str(source), "-o", str(text)], check=True)
    assert text.read_text().count("prefetch") >= 5  # at least one for each array that is read


LIMITS = """#include <initializer_list>
#include "shared_limits.h"
using namespace hytrain_fx;
extern "C" void limits(double* out) {
  for (double value : {double(kChunk), double(kGranule), double(kLeastGuessed), double(kMaxFactors), double(kMaxStates),
                       double(kCacheLineBytes),
                       double(kShadowApartBytes), double(kBlockThreads), double(kBlockElements), double(kUpdateKernels),
                       double(kRowsPerLaunch), double(kPartsPerGather), double(kLongestWaitS)}) *out++ = value;
}
"""


def test_cpp_has_the_limits_of_python(csrc: Path) -> None:
    """Each limit in `IN_CPP` has the same value on both sides."""
    (csrc / "limits.cpp").write_text(LIMITS)
    values = (ctypes.c_double * len(limits.IN_CPP))()
    build.load(("limits.cpp",), flags=(*build.FLAGS, f"-I{CSRC}")).limits(values)
    assert list(values) == [getattr(limits, name) for name in limits.IN_CPP]


def test_a_build_without_limits_is_refused(csrc: Path) -> None:
    """The compiler says where the missing definitions come from."""
    (csrc / "limits.cpp").write_text(LIMITS)
    flags = tuple(flag for flag in build.FLAGS if not flag.startswith("-D"))
    with pytest.raises(EngineError, match=r"no limits: compile with the definitions that .*hytrain_fx/ir/limits\.py"):
        build.library(("limits.cpp",), flags=(*flags, f"-I{CSRC}"))


def test_the_limits_print_without_the_library() -> None:
    """A Python that has no torch prints the definitions for builds by hand (scripts/race_check)."""
    printed = subprocess.run([sys.executable, "-I", "-S", str(limits.__file__)], capture_output=True, text=True, check=True).stdout
    assert tuple(printed.split()) == limits.definitions()
