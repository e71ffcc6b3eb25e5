"""Measures this machine into a `DeviceSpec`.

Each figure has the source "measured", and with them go the date, versions and hardware.

    CPU updates           the native engine's kernel by all workers, 28 bytes of host memory a bf16
                          parameter
    copies                pinned, both ways at once; without a GPU from host memory to host memory
    host memory           the most that was moved together: updates alone, updates beside copies
                          both ways, copies by all workers
    device                matrix products, its memory, the update kernel; without a GPU those of the
                          CPU

Without a GPU the device is the CPU itself, which has the host's memory and updates with the same
cores.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from hytrain_fx.config import MOST_WORKERS, Config
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.loads import HOST_BYTES_PER_PARAM, Calls, Copies, KernelUpdates, together
from hytrain_fx.ir.states import UPDATE_BYTES_PER_PARAM
from hytrain_fx.progress import untold
from hytrain_fx.runtime.launch import default_workers, make_engine
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.probe import UpdateProbe

# Share of the rate of single large matrix products that a compiled training step is estimated to
# reach.
STEP_SHARE = 0.75
_LEAST_BYTES = 1 << 20


@dataclass
class _Figures:
    """Figures found so far, with how each was found."""

    tell: Callable[[str], object]
    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: float, how: str) -> None:
        """Keep a figure."""
        self.values[name] = value
        self.sources[name] = f"measured: {how}"
        self.tell(f"measured {name.replace('_', ' ')}")


def measure_machine(
    name: str | None, seconds: float, host_bytes: int, workers: int | None = None, tell: Callable[[str], object] = untold
) -> DeviceSpec:
    """Measure for about ten times `seconds`, on `host_bytes` of host memory.

    A GPU's memory is used as much. `tell` is given each figure's name once it is measured.

    Raises ConfigError for lengths, sizes or workers that are not positive, too many workers, or
    more memory than is available; EngineError where the native engine's kernel cannot be built.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    workers = default_workers(device) if workers is None else workers
    if not 0 < seconds < math.inf or host_bytes < _LEAST_BYTES or not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"found {seconds} s on {host_bytes} bytes by {workers} workers, expected more than 0 s, at least "
                          f"{_LEAST_BYTES} bytes and 1 to {MOST_WORKERS} workers")
    if 2 * host_bytes > available_host_bytes():
        raise ConfigError(f"found {available_host_bytes()} bytes of host memory available, measuring takes {2 * host_bytes}; "
                          "pass a smaller --megabytes")
    figures = _Figures(tell)
    _measure_host(figures, device, seconds, host_bytes, workers)
    (_measure_gpu if device.type == "cuda" else _measure_cpu_as_device)(figures, device, seconds, host_bytes, workers)
    about = _about(device, workers)
    whole = {key: int(figures.values[key]) for key in ("memory_bytes", "host_memory_bytes")}
    found: dict[str, Any] = {**figures.values, **whole}
    return DeviceSpec(name or about.get("gpu") or f"cpu: {about['cpu']}", sources=figures.sources, about=about, workers=workers, **found)


def _measure_host(figures: _Figures, device: torch.device, seconds: float, host_bytes: int, workers: int) -> None:
    params = host_bytes // HOST_BYTES_PER_PARAM
    updates = [KernelUpdates(max(params // workers, 1)) for _ in range(workers)]
    alone = sum(rate.per_s for rate in together(updates, seconds))
    figures.put("cpu_update_params_per_s", alone, f"the native engine's kernel, {workers} threads, bf16 with fp32 states, "
                f"{params * HOST_BYTES_PER_PARAM / 1e9:.2f} GB")
    copies = _both_ways(device, host_bytes)
    to_device, to_host = (rate.per_s for rate in together(copies, seconds))
    where = "pinned memory" if device.type == "cuda" else "host memory to host memory"
    for name, rate in (("h2d_bytes_per_s", to_device), ("d2h_bytes_per_s", to_host)):
        figures.put(name, rate, f"blocks of 16 MB, {where}, both ways at once")
    beside = [rate.per_s for rate in together([*updates, *copies], seconds)]
    of_copy = 1 if device.type == "cuda" else 2  # a copy within host memory reads and writes there
    found = {
        "updates alone": UPDATE_BYTES_PER_PARAM * alone,
        "updates beside copies both ways": UPDATE_BYTES_PER_PARAM * sum(beside[:workers]) + of_copy * sum(beside[workers:]),
        f"copies by {workers} threads": 2 * sum(rate.per_s for rate in together(_within_host(host_bytes, workers), seconds)),
    }
    most = max(found, key=found.__getitem__)
    others = ", ".join(f"{name} {value / 1e9:.3g} GB/s" for name, value in found.items() if name != most)
    figures.put("host_memory_gb_per_s", found[most] / 1e9, f"{most} ({others})")
    figures.put("host_memory_bytes", available_host_bytes(), "what a process can take now")


def _both_ways(device: torch.device, nbytes: int) -> list[Copies]:
    half = nbytes // 4
    on_host = [torch.zeros(half, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    on_device = [torch.zeros(half, dtype=torch.uint8, device=device) for _ in range(2)]
    return [Copies(on_device[0], on_host[0]), Copies(on_host[1], on_device[1])]


def _within_host(nbytes: int, workers: int) -> list[Copies]:
    part = max(nbytes // (2 * workers), _LEAST_BYTES // 2)
    return [Copies(torch.zeros(part, dtype=torch.uint8), torch.zeros(part, dtype=torch.uint8)) for _ in range(workers)]


def _measure_gpu(figures: _Figures, device: torch.device, seconds: float, nbytes: int, _workers: int) -> None:
    weight = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
    engine = make_engine(Config(), [weight[: 1 << 24]])
    try:
        rate = 1e6 / UpdateProbe(engine, [weight]).us_per_param()
    finally:
        engine.close()
    figures.put("gpu_update_params_per_s", rate, "the engine's kernel, bf16 with fp32 states")
    target = torch.empty_like(weight)
    rate = _rate(lambda: target.copy_(weight), 2 * target.nbytes, device, seconds)
    figures.put("memory_bytes_per_s", rate, "copies within the device, read and written")
    figures.put("memory_bytes", torch.cuda.get_device_properties(device).total_memory, "what the driver gives")
    _put_products(figures, device, seconds, 8192, (torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16,))


def _measure_cpu_as_device(figures: _Figures, device: torch.device, seconds: float, _nbytes: int, _workers: int) -> None:
    for name, of_host, scale in (("gpu_update_params_per_s", "cpu_update_params_per_s", 1.0),
                                 ("memory_bytes_per_s", "host_memory_gb_per_s", 1e9), ("memory_bytes", "host_memory_bytes", 1.0)):
        figures.put(name, scale * figures.values[of_host], f"the host's own, as there is no GPU: {of_host}")
    _put_products(figures, device, seconds, 1024, (torch.float32, torch.bfloat16))


def _put_products(figures: _Figures, device: torch.device, seconds: float, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    rates = {}
    for dtype in dtypes:
        a, b, out = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(3))
        rates[dtype] = _rate(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), 2.0 * n**3, device, seconds)  # type: ignore[misc]
    best = max(rates, key=rates.__getitem__)
    figures.put("achieved_flops", STEP_SHARE * rates[best], f"products of {n} x {n} x {n} in {str(best).removeprefix('torch.')} at "
                f"{rates[best] / 1e12:.3g} TFLOP/s; a compiled step is estimated to reach {STEP_SHARE:.0%} of that")


def _rate(function: Callable[[], object], amount: float, device: torch.device, seconds: float) -> float:
    return together([Calls(function, amount, device)], seconds)[0].per_s


def _about(device: torch.device, workers: int) -> dict[str, str]:
    about = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": _cpu_name(), "cores": str(len(os.sched_getaffinity(0))),
        "workers": str(workers), "host_memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "torch": str(torch.__version__), "hytrain_fx": _own_version(),
    }
    if device.type == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return about


def _own_version() -> str:
    try:
        return metadata.version("hytrain_fx")
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
