"""Looks at this machine: whether training with overlap works here, and what it can do.

Each `Finding` says what was found, what that means, and what to do where it is not as it should be.
All together take a few seconds. Nothing is trained, and the native engine is not built: where the
cache does not have it, one of its small files is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Final

import torch

from hytrain_fx.errors import EngineError, HostMemoryError, HytrainWarning, UnsupportedError
from hytrain_fx.forecast.loads import HOST_BYTES_PER_PARAM, Copies, together
from hytrain_fx.ir.figures import bytes_text, count_text
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM, UPDATE_BYTES_PER_PARAM
from hytrain_fx.runtime.affinity import allowed_cpus
from hytrain_fx.runtime.launch import default_workers
from hytrain_fx.runtime.launch_queue import length_asked_for
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.native import build, libraries
from hytrain_fx.runtime.states.slabs import HostSlab
from hytrain_fx.torch_private.names import require_release

_SMALL_SOURCE: Final = ("step_clock.cpp",)
_HOST_SECONDS, _LINK_SECONDS = 0.7, 0.5
_COPIED_BYTES: Final = 128 << 20  # of each thread, far more than caches hold
_PINNED_BYTES: Final = 256 << 20
_BUILD: Final = "hytrain-fx build"
_OP_BY_OP: Final = 'options={"fallback_by_default": True}'


class State(StrEnum):
    """How a finding is: as it should be, working but slower, or so that training would not work."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    todo       the line to write or to run, where there is one
    figures    what was counted or measured, by name with the unit
    """

    what: str
    found: str
    meaning: str
    state: State = State.GOOD
    todo: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether training with overlap would not work."""
        return self.state is State.BAD


def examine(tell: Callable[[str], object]) -> tuple[Finding, ...]:
    """Everything that is looked at, in order; `tell` is given what is next. Raises nothing."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    looks: tuple[tuple[str, Callable[[torch.device], Iterator[Finding]]], ...] = (
        ("torch", _torch), ("native engine", _engine), ("CPU", _cores), ("host memory", _host_memory), ("GPU", _gpu),
        ("pinned memory", _link), ("kernels on the GPU", _kernels))
    found: list[Finding] = []
    for what, look in looks:
        tell(f"looking at: {what}")
        try:
            found += look(device)
        except Exception as error:  # what cannot be looked at is told of, like what is found
            found.append(Finding(what, f"{type(error).__name__}: {error}", "it could not be looked at, so training may fail there too",
                                 State.BAD, f"send this to the project, with the output of {_BUILD}"))
    return tuple(found)


def _torch(_device: torch.device) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            require_release()
        except UnsupportedError as error:
            yield Finding("torch", torch.__version__, str(error), State.BAD, 'pip install --upgrade "torch>=2.11"')
            return
    if any(issubclass(of.category, HytrainWarning) for of in caught):
        yield Finding("torch", torch.__version__, "newer than what was tried: private names of torch may have changed", State.NOTE,
                      "./scripts/test")
    else:
        yield Finding("torch", torch.__version__, "one of the releases that were tried")


def _engine(_device: torch.device) -> Iterator[Finding]:
    try:
        yield Finding("C++ compiler", build.find_compiler(), "torch.compile and a native engine that no wheel brought build with it")
    except EngineError:
        yield Finding("C++ compiler", "none", f"torch.compile makes its kernels with it; without, only compile(..., {_OP_BY_OP}) works",
                      State.BAD, "apt install g++")
    try:
        folder = build.cache_dir()
    except EngineError as error:
        yield Finding("cache folder", "cannot be written", str(error), State.BAD, "export HYTRAIN_FX_CACHE=/a/folder/of/yours")
        return
    yield _native_engine()
    files = [file for file in folder.iterdir() if file.is_file()]
    yield Finding("cache folder", f"{folder}: {_counted(len(files), 'file')}, {bytes_text(sum(file.stat().st_size for file in files))}",
                  "builds are kept there; HYTRAIN_FX_CACHE names another folder")


def _native_engine() -> Finding:
    try:
        there = libraries.existing(libraries.SOURCES)
        if there is None:
            build.load(_SMALL_SOURCE)
        else:
            there.load()
    except EngineError as error:
        return Finding("native engine", f"does not build: {str(error).splitlines()[0]}",
                       "the torch engine would be used, whose updates are about 30 times slower", State.BAD, _BUILD)
    if there is None:
        return Finding("native engine", "not built yet; a part of it compiles and loads", "the first compile() builds it once", State.NOTE,
                       _BUILD)
    return Finding("native engine", f"{there.origin}, and it loads", "compile() starts at once")


def _cores(device: torch.device) -> Iterator[Finding]:
    workers, cpus = default_workers(device), len(allowed_cpus())
    few = cpus < 4
    yield Finding("CPU", f"{_counted(cpus, 'logical CPU')}, {_counted(workers, 'update thread')}",
                  "update threads share cores with the launching thread, so updates hold it up" if few else
                  "updates by the CPU run on cores of their own", State.NOTE if few else State.GOOD,
                  figures={"cpus": cpus, "update_threads": workers})


def _host_memory(device: torch.device) -> Iterator[Finding]:
    available = available_host_bytes()
    params = available / HOST_BYTES_PER_PARAM
    yield Finding("host memory", f"{bytes_text(available)} available",
                  f"holds the AdamW states of about {count_text(params)} parameters ({STATE_BYTES_PER_PARAM} bytes each, and a slot)",
                  figures={"host_available_bytes": available})
    threads = default_workers(device)
    nbytes = min(_COPIED_BYTES, available // (4 * threads))
    copies = [Copies(torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(threads)]
    rate = 2 * sum(of.per_s for of in together(copies, _HOST_SECONDS))  # read and written
    yield Finding("its bandwidth", f"{bytes_text(rate)}/s, copied by {_counted(threads, 'thread')}",
                  f"the CPU updates at most {count_text(rate / UPDATE_BYTES_PER_PARAM)} parameters a second",
                  figures={"host_memory_bytes_per_s": rate})


def _gpu(device: torch.device) -> Iterator[Finding]:
    if device.type != "cuda":
        yield Finding("GPU", "none that torch sees", "training works on the CPU, and nothing is gained: the device is the CPU itself",
                      State.NOTE, "nvidia-smi" if torch.version.cuda else "install a CUDA build of torch, where there is a GPU")
        return
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    yield Finding("GPU", f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {bytes_text(free)} of {bytes_text(total)} free",
                  "weights, gradients and activations have to fit there, states need not",
                  figures={"gpu_memory_bytes": total, "gpu_free_bytes": free})
    if length_asked_for() is None:
        yield Finding("queue of launches", "its usual length", "step() would come late in the backward of models of many layers",
                      State.NOTE, "import hytrain_fx at the top, before CUDA is used")


def _link(device: torch.device) -> Iterator[Finding]:
    if device.type != "cuda":
        yield Finding("pinned memory", "not needed", "without a GPU nothing is copied to one")
        return
    try:
        slab = HostSlab(2 * _PINNED_BYTES)
        slab.pin(device)
    except (EngineError, HostMemoryError) as error:
        yield Finding("pinned memory", "refused", str(error), State.BAD, "ulimit -l unlimited")
        return
    yield Finding("pinned memory", f"{bytes_text(slab.nbytes)} pinned", "copies to and from the GPU run beside its work")
    hosts = [slab.take(_PINNED_BYTES, torch.uint8) for _ in range(2)]
    on_gpu = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    to_gpu, to_host = (of.per_s for of in together([Copies(on_gpu[0], hosts[0]), Copies(hosts[1], on_gpu[1])], _LINK_SECONDS))
    slab.unpin()
    yield Finding("link to the GPU", f"{bytes_text(to_gpu)}/s to it and {bytes_text(to_host)}/s from it, both at once",
                  f"gradients leave and weights come at {count_text(min(to_gpu, to_host) / 2)} 16-bit parameters a second",
                  figures={"h2d_bytes_per_s": to_gpu, "d2h_bytes_per_s": to_host})


def _kernels(device: torch.device) -> Iterator[Finding]:
    if device.type != "cuda":
        return
    from hytrain_fx.runtime.native import cuda_module

    try:
        cuda_module.update_functions(device.index)
        yield Finding("kernels on the GPU", "built, and they load", "updates on the GPU have the CPU's bits")
    except EngineError as error:
        yield Finding("kernels on the GPU", "do not build", str(error), State.BAD,
                      f"pip install cuda-bindings, of CUDA {torch.version.cuda}")
    if find_spec("triton") is None:
        yield Finding("Triton", "not installed", "torch.compile cannot make kernels for this GPU", State.BAD, "pip install triton")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
