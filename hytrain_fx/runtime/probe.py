"""Times what no row of the model has done yet.

The update on the device, with a row of its own, and both directions of the link at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from hytrain_fx.ir.limits import TIMED_COPY_BYTES
from hytrain_fx.ir.states import MOMENTS
from hytrain_fx.runtime.engine import CommitItem, Engine, RowSpec, RowStates, Stage
from hytrain_fx.runtime.updates import KERNEL_UPDATES, KernelUpdate

# Large enough that launching is no part of the rate, small compared with what the device holds.
MAX_PARAMS = 16 << 20
_RUNS, _COLD_RUNS = 7, 2
_COPIES = 3
# as every kernel takes them
_GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class UpdateProbe:
    """A row of its own, as large as the model's largest tensor, with memory only while it is timed.

    update     what is timed
    moments    as the option of a parameter group says
    """

    def __init__(
        self, engine: Engine, parameters: Sequence[torch.Tensor], update: KernelUpdate = KERNEL_UPDATES[torch.optim.AdamW],
        most_params: int = MAX_PARAMS, moments: str = "fp32",
    ) -> None:
        self._update = update
        self._group = {**_GROUP, MOMENTS: moments}
        largest = max(parameters, key=lambda p: p.numel())
        self._engine = engine
        self._numel = min(largest.numel(), most_params)
        # no alias of a weight that lives longer
        self._like = torch.empty(0, dtype=largest.dtype, device=largest.device)
        self._row: int | None = None  # rows are not taken out of an engine: it is used again

    def us_per_param(self) -> float:
        """Median microseconds per parameter.

        Uses up to 18 bytes of device memory per parameter of the row while it runs.
        """
        device, dtype = self._like.device, self._like.dtype
        weight, grad = (torch.rand(self._numel, device=device).to(dtype) for _ in range(2))
        states = self._states(weight if dtype == torch.float32 else weight.float())
        row = self._take_row(weight)
        self._engine.place_on_device(row, states)
        self._engine.record(True)
        runs = [self._run_us(self._item(row, states, grad)) for _ in range(_RUNS)][_COLD_RUNS:]
        self._engine.record(False)
        self._engine.set_weight(row, self._like)
        self._engine.place_on_device(row, RowStates(states.table, self._like, tuple(self._like.to(of.dtype) for of in states.states)))
        return statistics.median(runs) / self._numel

    def _take_row(self, weight: torch.Tensor) -> int:
        if self._row is None:
            self._row = self._engine.add_row(RowSpec(self._numel, 0, weight))
        else:
            self._engine.set_weight(self._row, weight)
        return self._row

    def _states(self, master: torch.Tensor) -> RowStates:
        table = self._update.table.under(self._group)
        return RowStates(table, master, tuple(torch.zeros_like(master, dtype=getattr(torch, of.dtype)) for of in table.states))

    def _item(self, row: int, states: RowStates, grad: torch.Tensor) -> CommitItem:
        return CommitItem(row, self._update.scalars(self._group, 1, grad.device.type == "cuda"), grad, at_end=True)

    def _run_us(self, item: CommitItem) -> float:
        self._engine.commit([item])
        self._engine.drain([item.row])
        spent = [r for r in self._engine.take_records() if r.row == item.row and r.stage is Stage.GPU_UPDATE]
        return sum(r.end_us - r.begin_us for r in spent)


def full_duplex_us_per_byte(device: torch.device) -> tuple[float, float]:
    """Microseconds per byte to the device and back while both directions are busy.

    The host's memory is pinned.

    On a GPU two streams copy three blocks of 16 MB each; with the model on the CPU copies are the
    host's own.
    """
    on_host = torch.empty(2, TIMED_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    on_device = torch.empty(2, TIMED_COPY_BYTES, dtype=torch.uint8, device=device)
    ways = ((on_device[0], on_host[0]), (on_host[1], on_device[1]))
    if device.type != "cuda":
        return _host_copies_us(*ways[0]) / TIMED_COPY_BYTES, _host_copies_us(*ways[1]) / TIMED_COPY_BYTES
    streams = [torch.cuda.Stream(device) for _ in ways]
    timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda.synchronize(device)
    for copies in (1, _COPIES):  # the first round warms both directions up
        timed = []
        for stream, (target, source) in zip(streams, ways, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # leaving a stream of another device makes a context on this one
            with torch.cuda.device(device), torch.cuda.stream(stream):
                begin.record(stream)
                for _ in range(copies):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
            timed.append((begin, end))
        torch.cuda.synchronize(device)
    to_device, to_host = (1e3 * float(begin.elapsed_time(end)) / (_COPIES * TIMED_COPY_BYTES) for begin, end in timed)
    return to_device, to_host


def _host_copies_us(target: torch.Tensor, source: torch.Tensor) -> float:
    runs = []
    for _ in range(_COPIES + 1):
        begin_s = time.perf_counter()
        target.copy_(source)
        runs.append((time.perf_counter() - begin_s) * 1e6)
    return statistics.median(runs[1:])
