"""Chooses and starts the engine of a session."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import psutil
import torch

from hytrain_fx.config import Config
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import CHUNK_PARAMS, Engine

# Cores left to the thread that launches the backward, the autograd thread, and the engine's two copy threads.
_LAUNCHING_CORES = 2
_RING_SLACK_BYTES = 64 << 10  # rounding of pieces


def default_workers() -> int:
    """CPU update threads where the option is not given: this process's cores, shared among the ranks of one host."""
    cores = min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or 1)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, cores // ranks - _LAUNCHING_CORES)


def ring_bytes_for(parameters: Sequence[torch.Tensor], wanted: int | None) -> int:
    """Device memory for gradients on their way: `wanted`, or four of the largest gradients, or twice all of them where that is less.

    At least what two pieces of one chunk need.
    """
    sizes = [p.numel() * p.element_size() for p in parameters]
    chunk = min(max(sizes), CHUNK_PARAMS * 4)
    return max(wanted or min(4 * max(sizes), 2 * sum(sizes)), 2 * chunk + _RING_SLACK_BYTES)


def make_engine(config: Config, parameters: Sequence[torch.Tensor]) -> Engine:
    """The engine that `config.engine` names. "auto" takes the native one and, where it cannot be built, says so and takes torch's.

    Raises EngineError when the named engine cannot be had.
    """
    device = parameters[0].device
    workers = config.workers or default_workers()
    ring_bytes = ring_bytes_for(parameters, config.ring_bytes)
    if config.engine in ("auto", "native"):
        from hytrain_fx.runtime.native_engine import NativeEngine

        try:
            return NativeEngine(device, workers, ring_bytes, config.timeout_s)
        except EngineError as error:
            if config.engine == "native":
                raise
            warnings.warn(f"the native engine is not available, the slower torch engine is used: {error}", stacklevel=4)
    from hytrain_fx.runtime.torch_engine import TorchEngine

    return TorchEngine(device, ring_bytes, config.timeout_s, adam=config.engine)
