"""The zoo's rows as one Markdown table, with the limit of each family and the rows below a target.

Only rows of one machine, booted the same time, stand in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.case import Case
from benchmarks.limit import Limit, Rates, limit_of
from benchmarks.machine import machine_text
from benchmarks.markdown import table
from benchmarks.results import Results, Row, is_short

Cases = Mapping[str, Case]  # by the names of `zoo.ROWS`

MOST_OVER_LIMIT = 1.15  # host and quarter, of their limits
MOST_OVER_DEVICE = 1.03  # solved, of all on the GPU
MOST_LAUNCHING_US = 60.0  # of our nodes, a unit and step
OURS = ("host", "quarter", "solved")
HEAD = ("family", "G parameters", "floor", "device", "host", "limit", "host / limit", "quarter", "quarter / its limit", "solved",
        "solved / device", "torchao", "torchao / host", "limit is of", "launching, us a unit")


@dataclass(frozen=True)
class Line:
    """A family's rows that were measured together, and the limits that follow from them."""

    family: str
    rows: Mapping[str, Row] = field(default_factory=dict)
    host_limit: Limit | None = None
    quarter_limit: Limit | None = None

    def step_s(self, row: str) -> float | None:
        """Seconds a step."""
        return float(self.rows[row]["step_s"]) if row in self.rows else None

    def over_limit(self, row: str) -> float | None:
        """A row's step over its limit."""
        limit = {"host": self.host_limit, "quarter": self.quarter_limit}[row]
        return _over(self.step_s(row), None if limit is None else limit.step_s)

    def launching_us(self, row: str) -> float | None:
        """Host microseconds a unit and step that launching takes more than without our nodes."""
        if any("launching_s" not in self.rows.get(name, {}) for name in (row, "floor")):
            return None
        of = self.rows[row]
        return 1e6 * float(of["launching_s"] - self.rows["floor"]["launching_s"]) / int(of["plan"]["units"])

    def below(self) -> Iterator[str]:
        """What misses its target, in sentences."""
        for row, limit in (("host", self.host_limit), ("quarter", self.quarter_limit)):
            if limit is not None and (over := self.over_limit(row)) is not None and over > MOST_OVER_LIMIT:
                yield (f"`{self.family}` {row}: {self.step_s(row):.4f} s, {over:.2f} of its limit {limit.step_s:.4f} s ({limit.binds}); "
                       f"at most {MOST_OVER_LIMIT} is wanted")
        if (over := _over(self.step_s("solved"), self.step_s("device"))) is not None and over > MOST_OVER_DEVICE:
            yield (f"`{self.family}` solved: {self.step_s('solved'):.4f} s, {over:.2f} of all on the GPU ({self.step_s('device'):.4f} s); "
                   f"at most {MOST_OVER_DEVICE} is wanted")
        if (over := _over(self.step_s("torchao"), self.step_s("host"))) is not None and over < 1:
            yield f"`{self.family}` host: torchao takes {over:.2f} of its time; no more is wanted"
        for row in OURS:
            if (us := self.launching_us(row)) is not None and us > MOST_LAUNCHING_US:
                yield f"`{self.family}` {row}: our nodes take {us:.0f} us a unit to launch; at most {MOST_LAUNCHING_US:.0f} is wanted"


def zoo_markdown(results: Results, families: Mapping[str, Cases]) -> str:
    """The table, the machines' rates, what is below its target, what failed."""
    lines = [line for name, cases in families.items() for line in lines_of(results, name, cases)]
    below = [f"- {text}" for line in lines for text in line.below()]
    failed = [f"- `{case.key}`: {row['error']}" for cases in families.values() for case in cases.values()
              if (row := results.get(case)) is not None and "error" in row]
    about = "Seconds a step: median of three windows, and half their spread. " + _machines(results, lines)
    parts = [table(HEAD, [_cells(line) for line in lines]), about, "## Below the target\n\n" + ("\n".join(below) or "None.")]
    parts += ["## Failed\n\n" + "\n".join(failed)] if failed else []
    return "\n\n".join(parts) + "\n"


def lines_of(results: Results, family: str, cases: Cases) -> list[Line]:
    """One line for each machine and boot that a family's rows were measured on."""
    machines: dict[str, dict[str, Row]] = {}
    for name, case in cases.items():
        if (row := results.measured(case)) is not None:
            machines.setdefault(machine_text(row["machine"]), {})[name] = row
    return [_line(results, family, rows) for rows in machines.values()]


def _line(results: Results, family: str, rows: Mapping[str, Row]) -> Line:
    first = next(iter(rows.values()))
    device = results.device_of(first["machine"])
    rates = None if device is None else Rates.of(device)
    if rates is None or "floor" not in rows:
        return Line(family, rows)
    floor_s, params = rows["floor"]["step_s"], first["params"]
    return Line(family, rows, limit_of(floor_s, params, rates), limit_of(floor_s, 0.75 * params, rates))


def _cells(line: Line) -> list[str]:
    first = next(iter(line.rows.values()))
    limit = line.host_limit
    return [
        line.family, f"{first['params'] / 1e9:.3g}", _time(line, "floor"), _time(line, "device"), _time(line, "host"),
        "-" if limit is None else f"{limit.step_s:.4f}", _ratio(line.over_limit("host")),
        _time(line, "quarter"), _ratio(line.over_limit("quarter")),
        _time(line, "solved"), _ratio(_over(line.step_s("solved"), line.step_s("device"))),
        _time(line, "torchao"), _ratio(_over(line.step_s("torchao"), line.step_s("host"))),
        "-" if limit is None else limit.binds,
        ", ".join(f"{row} {us:.0f}" for row in OURS if (us := line.launching_us(row)) is not None) or "-",
    ]


def _machines(results: Results, lines: list[Line]) -> str:
    found = {machine_text(row["machine"]): row["machine"] for line in lines for row in line.rows.values()}
    return " ".join(f"{text}; {_rates_text(results, found[text])}." for text in found)


def _rates_text(results: Results, machine: Mapping[str, object]) -> str:
    device = results.device_of(machine)
    rates = None if device is None else Rates.of(device)
    if rates is None:
        return "its rates were not measured, so there is no limit"
    return (f"host memory {rates.memory / 1e9:.0f} GB/s, link {rates.to_device / 1e9:.1f} GB/s to the device and "
            f"{rates.to_host / 1e9:.1f} GB/s back, both at once")


def _time(line: Line, name: str) -> str:
    if name not in line.rows:
        return "-"
    row = line.rows[name]
    return f"{row['step_s']:.4f} ±{row['spread'] / 2:.1%}" + (" (short)" if is_short(row) else "")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _over(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first / second
