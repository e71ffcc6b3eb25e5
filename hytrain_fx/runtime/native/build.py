"""Compile C++ from `csrc/` into one shared library, once per machine and source text.

    build.load(("engine.cpp", "engine_c.cpp"))  ->  ctypes.CDLL

Whether a library is built at all, or was brought by a wheel: libraries.py.

No build tool: the machine's g++ or clang++, all sources side by side, a few
seconds. The library lands in `$HYTRAIN_FX_CACHE`, else `$XDG_CACHE_HOME/hytrain_fx`, else
`~/.cache/hytrain_fx`, under a name that hashes everything it depends on: source text, headers,
flags, compiler and the CPU's instruction sets (a home directory may be shared by unlike machines).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hytrain_fx.errors import EngineError
from hytrain_fx.ir import limits
from hytrain_fx.runtime.affinity import allowed_cpus, threads_on

CSRC = Path(__file__).parents[1] / "csrc"

# On most machines that have vectors of 512 bits compilers take 256, as the lower clock slows other
# code down: workers run no other code.
_WIDEST = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()

# -ffp-contract=off: only the fused multiply-adds that are written (adamw.h). The -fno- pair lets
# square roots and divisions vectorise and changes no result. Never -ffast-math: besides other
# rounding, linking with it turns denormals off for the whole process.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    *_WIDEST,
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
    *limits.definitions(),
)
LINK = ("-shared", "-ldl")
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300
_log = logging.getLogger("hytrain_fx")
ELSE = "Or set CXX to another C++17 compiler, or pass engine='torch' (slower)."


def load(sources: tuple[str, ...], *, flags: tuple[str, ...] = FLAGS, link: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of `sources`, loaded; built first where the cache has none.

    Raises EngineError like `library`.
    """
    return opened(library(sources, flags=flags, link=link))


def opened(path: Path) -> ctypes.CDLL:
    """The library in a file. Raises EngineError where it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"the built library {path} does not load: {error}. Delete it to have it built again.") from error


def library(
    sources: tuple[str, ...], *, flags: tuple[str, ...] = FLAGS, link: tuple[str, ...] = (), tells: bool | None = None
) -> Path:
    """Path of the shared library of `sources`, names in csrc/; compiled where the cache has none.

    Safe when several processes build at once: each compiles to its own file and renames it.

    tells   whether stderr is told that it compiles, and how long it took; None: if that is a
            terminal

    Raises EngineError without a compiler, when it fails, or when the cache cannot be written.
    """
    path = path_of(sources, flags=flags, link=link)
    if not path.exists():
        with _telling(path, len(sources), on_stderr=sys.stderr.isatty() if tells is None else tells):
            _compile(find_compiler(), sources, flags, link, path)
    return path


def path_of(sources: tuple[str, ...], *, flags: tuple[str, ...] = FLAGS, link: tuple[str, ...] = ()) -> Path:
    """Where the library of `sources` is kept once it is built.

    Raises EngineError without a compiler.
    """
    return cache_dir() / f"{Path(sources[0]).stem}-{_key(sources, (*flags, *link), find_compiler())}.so"


@contextlib.contextmanager
def _telling(path: Path, files: int, *, on_stderr: bool) -> Iterator[None]:
    """Around compiling: one line on stderr, ended with the time it took, and one in the log."""
    began_s, ended = time.perf_counter(), "failed"
    if on_stderr:
        print(f"hytrain_fx: compiling {files} C++ files, once for this machine ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
        ended = f"{time.perf_counter() - began_s:.1f} s"
        _log.info("compiled %d C++ files into %s: %s", files, path, ended)
    finally:
        if on_stderr:
            print(ended, file=sys.stderr, flush=True)


def find_compiler() -> str:
    """Path of `$CXX` if set, else of the first of g++, clang++, c++.

    Raises EngineError when there is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    found = f"CXX is {asked!r}, which is not on PATH" if asked else f"none of {', '.join(COMPILERS)} is on PATH"
    raise EngineError(f"no C++ compiler for the native engine: {found}. Install g++. {ELSE}")


def cache_dir() -> Path:
    """The per-user cache directory, created. Raises EngineError where it cannot be."""
    named = os.environ.get("HYTRAIN_FX_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME")
    path = Path(named) if named else (Path(xdg) if xdg else Path.home() / ".cache") / "hytrain_fx"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def publish(data: bytes, path: Path) -> None:
    """Write `data` to `path` in one rename, so that no process ever sees half of it.

    Raises EngineError where it cannot.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="publish-") as scratch:
            (Path(scratch) / path.name).write_bytes(data)
            os.replace(Path(scratch) / path.name, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _compile(compiler: str, sources: tuple[str, ...], flags: tuple[str, ...], link: tuple[str, ...], path: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            objects = {source: str(Path(scratch) / f"{number}.o") for number, source in enumerate(sources)}
            with threads_on(allowed_cpus()), ThreadPoolExecutor(len(allowed_cpus())) as pool:
                list(pool.map(lambda source: _run([compiler, *flags, "-c", str(CSRC / source), "-o", objects[source]], source), sources))
            output = Path(scratch) / "library.so"
            _run([compiler, *flags, *objects.values(), "-o", str(output), *LINK, *link], ", ".join(sources))
            os.replace(output, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _run(command: Sequence[str], what: str) -> None:
    compiler = command[0]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"the compiler {compiler} did not finish: {error}. {ELSE}") from error
    if run.returncode != 0:
        raise EngineError(f"{compiler} failed on {what}. {ELSE}\n{' '.join(command)}\n{run.stderr[-4000:]}")


def _key(sources: tuple[str, ...], flags: tuple[str, ...], compiler: str) -> str:
    return text_key(sources, (*flags, *LINK, _version(compiler), platform.machine(), _cpu()))


def text_key(sources: tuple[str, ...], parts: tuple[str, ...]) -> str:
    """A hash of the text of sources and headers, and of `parts`."""
    digest = hashlib.sha256()
    for part in (*sources, *parts):
        digest.update(part.encode() + b"\0")
    for path in (*(CSRC / source for source in sources), *sorted(CSRC.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"the compiler {compiler} does not run: {error}. {ELSE}") from error


def instruction_sets() -> frozenset[str]:
    """Those of the first CPU, as /proc/cpuinfo names them; none where it does not tell."""
    told = (line.partition(":")[2].split() for line in _cpu().splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(told, ()))


def _cpu() -> str:
    """What -march=native depends on: the instruction sets and model of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "vendor_id", "cpu family", "model\t", "CPU implementer", "CPU part")
    return "\n".join(sorted(line for line in lines if line.startswith(kept)))


def _unwritable(path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"the build cache {path} cannot be written: {error}. Set HYTRAIN_FX_CACHE to a directory that can, or build once where it can."
    )
