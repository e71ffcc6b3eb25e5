"""Times the update on the device with a row of its own, for when no row of the model rests there yet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import CommitItem, Engine, RowSpec, RowStates, Stage

# Large enough that launching is no part of the rate, small beside what the device holds.
_MAX_PARAMS = 16 << 20
_RUNS, _COLD_RUNS = 7, 2
_GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class UpdateProbe:
    """The engine's last row: as many parameters as the model's largest tensor, with states only while it is timed."""

    def __init__(self, engine: Engine, parameters: Sequence[torch.Tensor]) -> None:
        largest = max(parameters, key=lambda p: p.numel())
        self._row = len(parameters)
        self._engine = engine
        self._numel = min(largest.numel(), _MAX_PARAMS)
        self._like = largest.detach()

    def us_per_param(self) -> float:
        """Median microseconds per parameter. Uses 18 bytes of device memory a parameter of the row while it runs."""
        device, dtype = self._like.device, self._like.dtype
        weight, grad = (torch.rand(self._numel, device=device).to(dtype) for _ in range(2))
        self._engine.add_row(RowSpec(self._numel, 0, weight))
        first, second = (torch.zeros(self._numel, device=device) for _ in range(2))
        master = weight if dtype == torch.float32 else weight.float()
        self._engine.place_on_device(self._row, RowStates(master, first, second, None, None))
        self._engine.record(True)
        runs = [self._run_us(grad) for _ in range(_RUNS)][_COLD_RUNS:]
        self._row += 1  # rows are not taken out again; a later probe adds its own
        self._engine.record(False)
        return statistics.median(runs) / self._numel

    def _run_us(self, grad: torch.Tensor) -> float:
        numbers = AdamScalars.of(_GROUP, 1, decoupled=True, torch_cuda=grad.device.type == "cuda")
        self._engine.commit([CommitItem(self._row, numbers, grad, at_end=True)])
        self._engine.drain([self._row])
        spent = [r for r in self._engine.take_records() if r.row == self._row and r.stage is Stage.GPU_UPDATE]
        return sum(r.end_us - r.begin_us for r in spent)
