"""Callables that log `hytrain_fx.metrics(model)` once a step, each on its tool's public API.

    log = TensorBoardLog(model, SummaryWriter("runs"))      # or WandbLog(model, wandb.init(...))
    for x, y in loader:
        ...
        optimizer.step()
        log()

Names begin with `hytrain_fx/`, in the text file of Prometheus with `hytrain_fx_`. With `every=10`
nine calls of ten return at once. `energy` is that of `hytrain_fx.metrics`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

import hytrain_fx
from hytrain_fx.errors import ConfigError
from hytrain_fx.session.step_metrics import METRICS

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class ScalarWriter(Protocol):
    """What is used of `torch.utils.tensorboard.SummaryWriter`, and of tensorboardX's."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> Any: ...


class MetricsLog(ABC):
    """Call it after `optimizer.step()`.

    every    how many calls go by for each that logs; the first one does
    energy   log the energy too, where it can be read

    Raises ConfigError for an `every` that is not positive.
    """

    def __init__(self, model: nn.Module, *, every: int = 1, energy: bool = False) -> None:
        if every < 1:
            raise ConfigError(f"found every={every}, expected 1 or more")
        self._model, self._every, self._energy = model, every, energy
        self._calls = 0

    def __call__(self, step: int | None = None) -> None:
        """Log the figures of now.

        step   the number to log them under; None: what the tool takes itself, or the count of steps

        Raises UnsupportedError for a model that is not compiled.
        """
        self._calls += 1
        if (self._calls - 1) % self._every == 0:
            self.write(hytrain_fx.metrics(self._model, energy=self._energy), step)

    @abstractmethod
    def write(self, values: Mapping[str, float], step: int | None) -> None:
        """Hand the figures to the tool."""


class WandbLog(MetricsLog):
    """To `run.log` of Weights & Biases.

    Without a step each call makes a row of its own; give the step of your own `run.log` to share
    its row.
    """

    def __init__(self, model: nn.Module, run: Any, *, every: int = 1, energy: bool = False) -> None:
        super().__init__(model, every=every, energy=energy)
        self._run = run

    def write(self, values: Mapping[str, float], step: int | None) -> None:
        self._run.log({f"hytrain_fx/{name}": value for name, value in values.items()}, step=step)


class TensorBoardLog(MetricsLog):
    """To `add_scalar` of a SummaryWriter; without a step the count of steps is the number."""

    def __init__(self, model: nn.Module, writer: ScalarWriter, *, every: int = 1, energy: bool = False) -> None:
        super().__init__(model, every=every, energy=energy)
        self._writer = writer

    def write(self, values: Mapping[str, float], step: int | None) -> None:
        number = int(values["steps_done"]) if step is None else step
        for name, value in values.items():
            self._writer.add_scalar(f"hytrain_fx/{name}", value, number)


class PrometheusFile(MetricsLog):
    """A file for the textfile collector of Prometheus' node_exporter, replaced in one rename.

    path     ends in .prom, in the collector's folder
    labels   of every figure: PrometheusFile(model, path, labels={"run": "a"})

    Raises ConfigError for another ending, a folder that does not exist, and a label that Prometheus
    does not take.
    """

    def __init__(self, model: nn.Module, path: str | Path, *, labels: Mapping[str, object] | None = None, every: int = 1,
                 energy: bool = False) -> None:
        super().__init__(model, every=every, energy=energy)
        self._path = Path(path).absolute()
        if self._path.suffix != ".prom":
            raise ConfigError(f"found the file {str(path)!r}, expected a name that ends in .prom: the collector reads no other")
        if not self._path.parent.is_dir():
            raise ConfigError(f"found the file {str(path)!r}, expected a name in a folder that exists; {str(self._path.parent)!r} is none")
        wrong = [name for name in labels or {} if not _LABEL.fullmatch(name)]
        if wrong:
            raise ConfigError(f"found the label {wrong[0]!r}, expected letters, digits and underscores, no digit first")
        named = ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in (labels or {}).items())
        self._labels = f"{{{named}}}" if named else ""

    def write(self, values: Mapping[str, float], step: int | None) -> None:
        lines = [line for name, value in values.items() for line in (
            f"# HELP hytrain_fx_{name} {METRICS[name].meaning}",
            f"# TYPE hytrain_fx_{name} {METRICS[name].kind}",
            f"hytrain_fx_{name}{self._labels} {float(value)!r}",
        )]
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")  # no .prom at its end: it is not collected
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(scratch, self._path)
