"""Which library of some C++ sources is loaded: one that a wheel brought, or one built here.

    library(SOURCES)  ->  Library(path, origin="wheel, x86-64-v4")

A wheel (scripts/build-wheel) brings each of `SHIPPED` in `prebuilt/`, once for each of `BASELINES`,
under a name that hashes sources, headers, limits and flags. The best one that this CPU can run is
taken, if it was made of the text that is here. Else the library is built for this very CPU
(build.py). A source checkout has no `prebuilt/`, so it always builds. All have the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hytrain_fx.runtime.native import build

SOURCES: Final = (
    "engine_c.cpp", "engine.cpp", "engine_state.cpp", "row.cpp", "guess.cpp", "step_clock.cpp", "records.cpp", "shadow_arena.cpp",
    "staging_area.cpp", "factor_slots.cpp", "host_update.cpp", "updates.cpp", "guesses.cpp", "early_updates.cpp", "homeward.cpp",
    "lane_order.cpp", "lane_progress.cpp", "flagged_tail.cpp", "streamed_visits.cpp", "device_updates.cpp", "lander.cpp", "workers.cpp",
    "uploader.cpp", "grad_offload.cpp", "grad_fetches.cpp", "commit.cpp", "waits.cpp", "cpu_device.cpp", "cuda_device.cpp")
KERNEL_SOURCES: Final = ("kernels_c.cpp",)
# op_reads.cpp and storage_memory.cpp are not among them: they are bound to the C++ interface of one
# release of torch.
SHIPPED: Final = (SOURCES, KERNEL_SOURCES)
PREBUILT: Final = Path(__file__).parent / "prebuilt"
BUILT_HERE: Final = "built here"
# A machine's libstdc++ may be older than that of the machine that builds the wheel. What of it is
# not used is left out, as it may need a newer glibc.
_LINK: Final = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")


@dataclass(frozen=True, slots=True)
class Library:
    """A library that is there: its file, and where it comes from, in words."""

    path: Path
    origin: str

    def load(self) -> ctypes.CDLL:
        """Raises EngineError where it does not load."""
        return build.opened(self.path)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A level of x86-64 that compilers know, and what a CPU of it has.

    name     as -march has it
    needs    instruction sets, as /proc/cpuinfo names them
    """

    name: str
    needs: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of a build for this machine, for the baseline instead."""
        return tuple(f"-march={self.name}" if flag == "-march=native" else flag for flag in build.FLAGS)


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BASELINES: Final = (Baseline("x86-64-v4", _V4), Baseline("x86-64-v3", _V3))  # the best first


def library(sources: tuple[str, ...], *, tells: bool | None = None) -> Library:
    """The library of `sources`, built first where it has to be.

    Raises EngineError like `build.library`, which explains `tells`.
    """
    return _brought(sources) or Library(build.library(sources, tells=tells), BUILT_HERE)


def existing(sources: tuple[str, ...]) -> Library | None:
    """The library that `library` takes, None where that has to be built.

    Raises EngineError where it could not be built.
    """
    brought = _brought(sources)
    if brought is not None:
        return brought
    built = build.path_of(sources)
    return Library(built, BUILT_HERE) if built.exists() else None


def _brought(sources: tuple[str, ...]) -> Library | None:
    """The wheel's best one for this CPU, if it has one of this text."""
    if not PREBUILT.is_dir():
        return None
    has = build.instruction_sets()
    fitting = (baseline for baseline in BASELINES if baseline.needs <= has)
    brought = (Library(PREBUILT / _file_name(sources, baseline), f"wheel, {baseline.name}") for baseline in fitting)
    return next((of for of in brought if of.path.is_file()), None)


def _file_name(sources: tuple[str, ...], baseline: Baseline) -> str:
    return f"{Path(sources[0]).stem}-{baseline.name}-{build.text_key(sources, baseline.flags)}.so"


def build_ahead(folder: Path) -> None:
    """Put into `folder`, which is made, what a wheel brings.

    Raises EngineError like `build.library`.
    """
    folder.mkdir(parents=True)

    def put(sources: tuple[str, ...], baseline: Baseline) -> None:
        shutil.copy(build.library(sources, flags=baseline.flags, link=_LINK), folder / _file_name(sources, baseline))

    with ThreadPoolExecutor() as pool:  # one's link beside another's files
        list(pool.map(put, *zip(*itertools.product(SHIPPED, BASELINES), strict=True)))
