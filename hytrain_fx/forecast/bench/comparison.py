"""What `bench` found, as tables and a verdict for a terminal, or as JSON.

The sentences of the verdict are those of `report`, with measured figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from hytrain_fx.forecast.bench.process import lacked_memory
from hytrain_fx.forecast.bench.row import WAYS
from hytrain_fx.forecast.doctor import Finding
from hytrain_fx.forecast.doctor_table import printed
from hytrain_fx.forecast.shapes import Counted
from hytrain_fx.forecast.verdict import everything_fits_line, fits_line, our_line, pace_text
from hytrain_fx.ir.figures import bytes_text, count_text, params_text, time_text

_MACHINE = ("CPU", "host memory", "its bandwidth", "GPU", "link to the GPU")
_AS_FAST = 1.02  # times the other's step
_ROUGH = 0.1  # of a row's median: its windows differ by more
NO_GPU = "There is no GPU here: the device is the CPU itself. The times show that all of it runs, and say nothing of a GPU."

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The machine, the model, and the rows by way of training; one that failed has an `error`."""

    machine: Sequence[Finding]
    model: str
    params: int
    count: int
    counted: Counted
    size: str
    steps: int
    rows: Mapping[str, Row]

    @property
    def figures(self) -> dict[str, float]:
        """What is known of the machine, by name."""
        return {name: value for found in self.machine for name, value in found.figures.items()}

    @property
    def has_gpu(self) -> bool:
        """Whether the device is one."""
        return "gpu_memory_bytes" in self.figures

    @property
    def tier(self) -> str:
        """The device, in words."""
        return "the GPU" if self.has_gpu else "the device"

    def step_us(self, way: str) -> float | None:
        """Of a way that was timed."""
        row = self.rows.get(way, {})
        return None if "step_s" not in row else 1e6 * row["step_s"]

    def verdict(self) -> list[str]:
        """One statement a line, the last one says what to do."""
        return [line for line in self._lines() if line]

    def _lines(self) -> Iterator[str]:
        floor, plain, ours = (self.step_us(way) for way in ("floor", "all_on_device", "solved"))
        if floor is None:
            yield self._failed("Forward and backward alone: it", "floor")
            return
        row, tier = self.rows["solved"], self.tier
        if not self.has_gpu:
            yield NO_GPU
        if (spread := max(of.get("spread", 0.0) for of in self.rows.values())) > _ROUGH:
            yield f"The times are rough: windows of one row differ by {spread:.0%}. Other work is on the machine, or --steps is small."
        if ours is None:
            yield self._failed("With our plan it", "solved")
        elif self.has_gpu:
            yield fits_line(1e9 * row["gpu_peak_allocated_gb"], self.figures["gpu_memory_bytes"], row["memory_in_use"]["host_bytes"],
                            self.figures["host_available_bytes"])
        if plain is None:
            yield self._failed(f"With everything on {tier} it", "all_on_device")
        else:
            gb = self.rows["all_on_device"]["gpu_peak_allocated_gb"]
            yield everything_fits_line(None if gb is None else 1e9 * gb, self._pace(plain), too=ours is not None, tier=tier)
        if ours is not None:
            share, plan = row["plan"]["share"], row["plan"]
            streamed = share["stream"] / max(share["stream"] + share["cpu"], 1e-9)
            yield our_line(self._pace(ours), ours / floor, plan["k"], plan["units"], streamed, "Measured.", tier)
            yield _sentence(row["binds_line"])
            yield _sentence(row["change_line"])
            if self.has_gpu:
                yield self._advice(floor, plain, ours)

    def _failed(self, what: str, way: str) -> str:
        why = str(self.rows[way]["error"])
        return f"{what} {'does not fit' if lacked_memory(why) else 'did not run'}: {why}"

    def _pace(self, step_us: float) -> str:
        return pace_text(step_us, self.count, self.counted)

    def _advice(self, floor: float, plain: float | None, ours: float) -> str:
        if plain is None and not lacked_memory(self.rows["all_on_device"]["error"]):
            return ""
        if plain is None:
            return f"Use it: the model does not train here otherwise, and a step is {ours / floor:.2f} times forward and backward alone."
        host = self.step_us("all_on_host")
        saved = self.rows["all_on_device"]["gpu_peak_allocated_gb"] - self.rows.get("all_on_host", {}).get("gpu_peak_allocated_gb", 0.0)
        room = "" if host is None else (f" With all states on the host {bytes_text(1e9 * saved)} more are free, at {host / plain:.2f} "
                                        "times a plain step: room for a larger batch.")
        times = f"our plan takes {ours / plain:.2f} times its step"
        fast = "a plain compiled loop is " + (f"faster: {times}" if ours > _AS_FAST * plain else "as fast" if plain <= _AS_FAST * ours
                                              else f"slower: {times}")
        return f"Everything fits here, and {fast}.{room}"

    def text(self) -> str:
        """Tables of the machine and of the rows, then the verdict."""
        machine = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for found in self.machine:
            if found.what in _MACHINE:
                machine.add_row(found.what, Text(found.found))
        head = f"{self.model}: {params_text(self.params)} parameters, {self.size} a step, median of three windows of {self.steps} steps"
        failed = [Text(f"{WAYS[way].title}: {row['error']}", "red") for way, row in self.rows.items() if "error" in row]
        return printed(machine, "", Text(head, "bold"), "", self._table(), *failed, "", Text("\n".join(self.verdict())))

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        on = self.tier.replace(" ", "\n")
        for head in ("step", "spread", "times\nfirst", f"{self.counted}\na second", "GPU\nmemory", f"states on\n{on}", "states\nstreamed"):
            table.add_column(head, justify="right", no_wrap=True)
        floor = self.step_us("floor")
        for way, row in self.rows.items():
            if (step_us := self.step_us(way)) is None:
                continue
            share = row.get("plan", {}).get("share")
            gb = row["gpu_peak_allocated_gb"]
            over = "-" if floor is None else f"{step_us / floor:.2f}"
            table.add_row(WAYS[way].title, time_text(step_us), f"{row['spread']:.0%}", over, count_text(1e6 * self.count / step_us),
                          "-" if gb is None else bytes_text(1e9 * gb), "-" if share is None else f"{share['gpu']:.0%}",
                          "-" if share is None else f"{share['stream']:.0%}", style="bold" if way == "solved" else None)
        return table

    def to_json(self) -> str:
        """All figures; `rows` is by way, with every window, memory, the plan and its prediction."""
        return json.dumps({
            "machine": {"figures": self.figures, "findings": [asdict(found) for found in self.machine]},
            "model": {"name": self.model, "params": self.params, "size": self.size, "count": self.count, "counted": self.counted},
            "steps": self.steps, "rows": self.rows, "verdict": self.verdict(),
        }, indent=1)


def _sentence(line: str) -> str:
    """A line of `explain` as a sentence."""
    return f"{line[0].upper()}{line[1:]}." if line else ""
