"""One row of `bench`, measured in this process: one way of training one model, as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from hytrain_fx.errors import HostMemoryError
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.bench.memory import memory
from hytrain_fx.forecast.bench.windows import OTHER_WARMUP_STEPS, OUR_WARMUP_STEPS, timed
from hytrain_fx.forecast.bench.workload import Asked, Batch, Workload, workload
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.runtime.energy import meter_of
from hytrain_fx.runtime.memory import available_host_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training, in words."""

    title: str
    make: Callable[[Workload], Trainer[Batch]]
    warmup_steps: int = OTHER_WARMUP_STEPS


def _all_on_device(of: Workload) -> Trainer[Batch]:
    states_bytes = STATE_BYTES_PER_PARAM * of.params
    if _device().type == "cpu" and states_bytes > available_host_bytes():  # the system would end this process
        raise HostMemoryError(f"its states take {bytes_text(states_bytes)}, {bytes_text(available_host_bytes())} are available")
    return loops.on_device(of.model, of.backward, fused=True)


WAYS: Final[Mapping[str, Way]] = {
    "floor": Way("forward and backward", lambda of: loops.floor(of.model, of.backward)),
    "all_on_device": Way("plain, all on device", _all_on_device),
    "all_on_host": Way("hytrain_fx, all on host", lambda of: loops.ours(of.model, of.backward, {"gpu_states": 0.0}),
                       OUR_WARMUP_STEPS),
    "solved": Way("hytrain_fx, plan solved", lambda of: loops.ours(of.model, of.backward, {}), OUR_WARMUP_STEPS),
}


def measured(asked: Asked, way: str, steps: int) -> dict[str, Any]:
    """The row of one of `WAYS`: windows of `steps` steps.

    Raises a HytrainError, or torch.OutOfMemoryError where it does not fit.
    """
    device, how = _device(), WAYS[way]
    of = workload(asked, device)
    trainer = how.make(of)
    batches = itertools.repeat(of.batch)
    trainer.step(of.batch)
    trainer.finish()
    row = {"way": way, "params": of.params, "count": of.count, "counted": of.counted,
           **timed(trainer, batches, how.warmup_steps, steps, device, meter_of(device), of.count)}
    about = dict(trainer.about())
    in_use = about.get("memory_in_use", {})
    row |= memory(device, in_use.get("pinned_bytes", in_use.get("host_bytes", 0))) | about
    return row | (_advice(of) if about else {})


def _advice(of: Workload) -> dict[str, str]:
    from hytrain_fx.api import explain

    verdict = explain(of.model).verdict
    return {"binds_line": verdict.binds_line(), "change_line": verdict.change_line()}


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
