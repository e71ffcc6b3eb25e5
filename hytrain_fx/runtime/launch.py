"""Chooses and starts the engine of a session."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, EngineError, HytrainWarning, UnsupportedError
from hytrain_fx.ir.limits import CHUNK_PARAMS, FP32_BYTES, TRANSIT_BYTES
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import ADAMW_DEFAULT
from hytrain_fx.runtime.affinity import allowed_cpus, threads_on
from hytrain_fx.runtime.engine import Engine, staging_shape
from hytrain_fx.runtime.memory import total_bytes
from hytrain_fx.runtime.topology import cpus_for, launching_cores, local_ranks, pick_workers, read_topology, usable_cores
from hytrain_fx.runtime.training_threads import workers_beside_training
from hytrain_fx.runtime.updates import KERNEL_UPDATES

# part of TRANSIT_BYTES, for AdamW's streamed states
STAGING_BYTES = math.prod(staging_shape(CHUNK_PARAMS, ADAMW_DEFAULT.tensors)) * FP32_BYTES
_RING_SLACK_BYTES = 64 << 10  # rounding of pieces


def default_workers(device: torch.device | None = None, *, beside_training: bool = False) -> int:
    """CPU update threads where the option is not given.

    This rank's physical cores less the launching ones. `beside_training`: those of the GPU's
    socket, where others train.
    """
    topology = read_topology(device)
    cores = _cores_without_topology() if topology is None else usable_cores(topology)
    if beside_training and topology is not None:
        cores = min(cores, workers_beside_training(topology) or cores)
    return max(1, cores - launching_cores(cores))


def _cores_without_topology() -> int:
    cores = min(len(allowed_cpus()), psutil.cpu_count(logical=False) or 1)
    return cores // local_ranks()


def ring_bytes_for(parameters: Sequence[torch.Tensor], config: Config, streams: bool) -> int:
    """Device memory for gradients on their way: `ring_bytes`, or the least of four of the largest
    gradients, twice all of them, and 640 MB (338 MB where states are streamed, which take the
    rest).

    At least what two pieces of one chunk need; a smaller `ring_bytes` raises ConfigError. A unit
    goes in one piece, after the copies of the one before where it takes more than half; what does
    not fit goes in several, of half of it each.

    Why that is enough: in the ring is the backlog, gradients made less gradients carried. Where the
    backward makes them more slowly than the link carries them (3.1 G 16-bit parameters in 200 ms:
    31 GB/s of 50), a backlog comes only from what is handed over at once, the gradients of one
    unit, and the backward waits for what exceeds the ring (measured: 5 ms a unit of 250 M 16-bit
    parameters with 338 MB, 20 times in a step: so what streaming does not need is lent). Where it
    makes them faster throughout (few tokens), the backlog grows all along the backward and no ring
    of a fixed size holds it; then the link sets the length of the step, and a larger ring only
    moves the wait into the next forward.
    """
    sizes = [p.numel() * p.element_size() for p in parameters]
    chunk = min(max(sizes), CHUNK_PARAMS * FP32_BYTES)
    limit = TRANSIT_BYTES - (STAGING_BYTES if streams else 0)
    least = 2 * chunk + _RING_SLACK_BYTES
    if config.ring_bytes is None:
        return max(min(4 * max(sizes), 2 * sum(sizes), limit), least)
    if config.ring_bytes < least:
        raise ConfigError(f"option ring_bytes={config.ring_bytes}: expected at least {least} for this model's largest gradient, "
                          f"of {max(sizes)} bytes, or None")
    return config.ring_bytes


def torch_engine_config(config: Config, optimizer: str) -> Config:
    """The options for an optimizer without a kernel, whose steps the torch engine runs.

    Raises UnsupportedError where another engine, or streaming, is asked for.
    """
    asked = f"engine={config.engine!r}" if config.engine in ("native", "deepspeed") else None
    if config.stream not in ("auto", 0) or (config.plan is not None and config.plan.numel(Placement.STREAM)):
        asked = "streamed states"
    if config.fetches:
        asked = f'weights="{config.weights}"'
    if asked is not None:
        kernels = ", ".join(kind.__name__ for kind in KERNEL_UPDATES)
        raise UnsupportedError(f"{asked} with {optimizer}: that is for {kernels}; other optimizers run on engine=\"torch\", "
                               "with states on the CPU or on the device, and weights there: leave these options at their defaults")
    return replace(config, engine="torch", stream=0.0)


def make_engine(config: Config, parameters: Sequence[torch.Tensor]) -> Engine:
    """The engine that `config.engine` names.

    "auto" takes the native one. Where that cannot be built, it says so and takes torch's.

    Its threads do not take over what the calling thread is bound to. Raises EngineError when the
    named engine cannot be had.
    """
    device = parameters[0].device
    stages = 1 if config.pipeline is None else config.pipeline.here  # of this rank, each with an engine: they share its cores
    workers = config.workers or max(1, default_workers(device, beside_training=config.cpu_share != 0) // stages)
    cpus = len(allowed_cpus())
    if config.workers is not None and workers > cpus:
        warnings.warn(f"option workers={workers}: this process may run on {cpus} CPUs, so update threads wait for each other; "
                      f"leave workers out, which takes {default_workers(device)}", HytrainWarning, stacklevel=4)
    # `Engine.set_transit` when states are streamed
    ring_bytes = ring_bytes_for(parameters, config, streams=False)
    room = total_bytes(device) if device.type == "cuda" else psutil.virtual_memory().total
    if config.ring_bytes is not None and ring_bytes > room:
        raise ConfigError(f"option ring_bytes={ring_bytes}: the device has no room for it, {room} bytes in all; None takes what is needed")
    if config.engine in ("auto", "native"):
        try:
            return _native_engine(config, device, workers, ring_bytes)
        except EngineError as error:
            if config.engine == "native":
                raise
            warnings.warn(f"the native engine is not available, the slower torch engine is used: {error}", HytrainWarning, stacklevel=4)
    from hytrain_fx.runtime.fallback.engine import TorchEngine

    topology = read_topology(device)
    # Its worker takes torch's threads with it.
    with threads_on(allowed_cpus() if topology is None else cpus_for(topology, torch.get_num_threads())):
        return TorchEngine(device, ring_bytes, config.timeout_s, adam=config.engine)


def _native_engine(config: Config, device: torch.device, workers: int, ring_bytes: int) -> Engine:
    from hytrain_fx.runtime.native.engine import NativeEngine

    topology = read_topology(device)
    cores = pick_workers(topology, workers) if config.pin_workers and topology is not None else None
    with threads_on(allowed_cpus() if topology is None else cpus_for(topology, workers)):
        return NativeEngine(device, workers, ring_bytes, config.timeout_s, cores, config.shadow_memory)
