"""The rows measured so far, in one JSON file, and how one row compares with another.

The file is written again after each row.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.case import CannotRun, Case
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec

Row = dict[str, Any]  # what `steps` prints, or the case's fields, the machine where known, and "error"


class Results:
    """The rows of `path` by the key of their case, in the order they were measured.

    Beside them are the rates of the machines they ran on, where these were measured.
    """

    def __init__(self, path: Path) -> None:
        """Read `path`, where it exists. Raises CannotRun where it is no result file."""
        self.path = path
        self._rows: dict[str, Row] = {}
        self._devices: dict[str, DeviceSpec] = {}
        self._writing = threading.Lock()
        if path.exists():
            try:
                read = json.loads(path.read_text())
                rows = read["rows"]
                self._devices = {name: DeviceSpec.from_figures(figures) for name, figures in read.get("devices", {}).items()}
            except (ValueError, KeyError, TypeError, ConfigError) as error:
                raise CannotRun(f"{path} is not a result file ({error}); choose another --out") from error
            self._rows = {Case.of_row(row).key: row for row in rows}

    def put(self, case: Case, row: Row) -> None:
        """Take a row, instead of an earlier one of the same case, and write the file."""
        with self._writing:
            self._rows.pop(case.key, None)
            self._rows[case.key] = row
            self._write()

    def put_device(self, machine: Mapping[str, Any], device: DeviceSpec) -> None:
        """Take the measured rates of a machine, and write the file."""
        with self._writing:
            self._devices[_booted(machine)] = device
            self._write()

    def device_of(self, machine: Mapping[str, Any]) -> DeviceSpec | None:
        """The rates of a machine as it was booted; None where they were not measured."""
        return self._devices.get(_booted(machine))

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        devices = {name: asdict(device) for name, device in self._devices.items()}
        part.write_text(json.dumps({"rows": list(self._rows.values()), **({"devices": devices} if devices else {})}, indent=1))
        part.replace(self.path)

    def get(self, case: Case) -> Row | None:
        """The row of a case, also one that failed."""
        return self._rows.get(case.key)

    def measured(self, case: Case) -> Row | None:
        """The row of a case that was timed."""
        row = self.get(case)
        return row if row is not None and "error" not in row else None

    def cases(self) -> list[Case]:
        """All cases that have a row."""
        return [Case.of_row(row) for row in list(self._rows.values())]  # others may put one meanwhile

    def all_measured(self) -> Iterator[tuple[Case, Row]]:
        """Every case that was timed, with its row."""
        for case in self.cases():
            if (row := self.measured(case)) is not None:
                yield case, row

    def step_over(self, case: Case, other: Case) -> float | None:
        """Step time of one case divided by another's.

        None unless both were timed on one machine in one boot.
        """
        row, against = self.measured(case), self.measured(other)
        if row is None or against is None or row["machine"] != against["machine"]:
            return None
        return float(row["step_s"] / against["step_s"])


def _booted(machine: Mapping[str, Any]) -> str:
    return f"{machine['gpu']}, boot {machine['boot']}"


def floor_of(case: Case) -> Case:
    """Forward and backward of the same model, batch and precision; the floor never clips."""
    return replace(case, mode="floor", clip=None, scaled_every=1, options=())


def all_gpu_of(case: Case) -> Case:
    """The same training with everything on the GPU, without clipping."""
    return replace(case, mode="all_gpu", clip=None, scaled_every=1, options=())


def peer_of(case: Case, mode: str) -> Case:
    """The same training by a peer, in the precision the peer has; torchao never clips."""
    autocast = mode == "torchao"
    return replace(case, mode=mode, clip=None if mode == "torchao" else case.clip, scaled_every=1, autocast=autocast, options=())


def is_short(row: Mapping[str, Any]) -> bool:
    """Whether its windows are shorter than the ten steps that a figure to be quoted needs."""
    return int(row["window_steps"]) < 10
