"""Families of models side by side: floor, all on the GPU, ours three ways, torchao, and the limit.

    python -m benchmarks zoo --families gpt2,qwen2 --rows floor,host --limit-s 540 --out zoo.json
    python -m benchmarks zoo --out zoo.json --table       # print what is there, run nothing
    python -m benchmarks zoo --counts                     # small models on this CPU: graphs, waits

Rows compile side by side on one GPU and take turns being timed. The machine's rates are measured
first, for the limit (`benchmarks/limit.py`). Rows in the file are not run again: a call that was
ended by --limit-s goes on where it stopped.

    floor      compiled forward and backward, no optimizer
    device     compiled, fused AdamW on fp32 masters on the GPU
    host       ours, gpu_states=0.0
    quarter    ours, gpu_states=0.25
    solved     ours, as it comes
    torchao    CPUOffloadOptimizer, blocks compiled, fp32 parameters under autocast
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.case import CannotRun, Case
from benchmarks.cases import ON_HOST, QUARTER
from benchmarks.counts import counts_of_family, counts_table, units_of_large
from benchmarks.families import FAMILIES, SMALL, family_of
from benchmarks.machine import machine
from benchmarks.results import Results
from benchmarks.runner import Launch, environment, measure
from benchmarks.turns import Ask, seats
from benchmarks.zoo_table import zoo_markdown
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.progress import stage

ROWS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "floor": ("floor", ()), "device": ("all_gpu", ()), "host": ("ours", ON_HOST), "quarter": ("ours", QUARTER), "solved": ("ours", ()),
    "torchao": ("torchao", ()),
}
# Bytes of a parameter on the GPU beside activations, and on the host, about: rows begin where there
# is room for them. States on the host have places beside them where updates begin before step().
BYTES_PER_PARAM: Mapping[str, tuple[float, float]] = {
    "floor": (4, 0), "device": (20, 0), "host": (4, 21), "quarter": (7, 17), "solved": (17, 21), "torchao": (10, 22),
}
ROW_GPU_GB, ROW_HOST_GB = 2.0, 4.0  # what each process takes whatever its model
RATES_S, RATES_MB, RATES_LIMIT_S = 0.5, 1024, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks zoo`."""
    parser.add_argument("--families", type=_names(FAMILIES), default=list(FAMILIES), help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--rows", type=_names(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"), help="the rows; logs are in a folder beside it")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all of this call")
    parser.add_argument("--rows-per-gpu", type=int, default=6, metavar="N", help="so many rows compile at once, as far as memory allows")
    parser.add_argument("--window", type=int, default=10, help="steps in one of the three windows")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window")
    parser.add_argument("--cache", type=Path, default=None, help="TORCHINDUCTOR_CACHE_DIR of the rows (default: torch's own)")
    parser.add_argument("--small", action="store_true", help="the small models, on any machine: shows that the command runs")
    parser.add_argument("--retry", action="store_true", help="run the rows again that failed")
    parser.add_argument("--look", action="store_true",
                        help="ours: explain's text goes to the row's log, and three recorded steps to .json files (Chrome trace) beside it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--table", action="store_true", help="print the table of what is there, run nothing")
    what.add_argument("--counts", action="store_true", help="print graphs, breaks, units, waits and nodes of the small models")


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing and print the table, or what was asked for instead. Raises CannotRun."""
    if arguments.counts:
        print(counts_table({name: (counts_of_family(name), units_of_large(name)) for name in arguments.families}))
        return
    results = Results(arguments.out)
    if not arguments.table:
        _measure(arguments, results)
    print(zoo_markdown(results, {name: cases_of(name, list(ROWS), arguments.small) for name in arguments.families}))


def cases_of(family: str, rows: Sequence[str], small: bool = False) -> dict[str, Case]:
    """The cases of a family's rows."""
    name = family + SMALL if small else family
    size = family_of(name)[1]
    return {row: Case(ROWS[row][0], name, size.batch, size.length, options=ROWS[row][1]) for row in rows}


def ask_of(row: str, case: Case, looks: Path | None = None) -> Ask:
    """What a row takes of device and host, at most and about.

    With the folder `looks`, one of ours is looked into after its windows.
    """
    size = family_of(case.size)[1]
    on_gpu, on_host = BYTES_PER_PARAM[row]
    look = () if looks is None or case.mode != "ours" else ("--explain", "--timeline", str(looks / f"{case.size}_{row}.json"))
    return Ask(look, size.activations_gb + on_gpu * size.params_g + ROW_GPU_GB, on_host * size.params_g + ROW_HOST_GB)


def _measure(arguments: argparse.Namespace, results: Results) -> None:
    began_s = time.monotonic()
    logs = arguments.out.with_suffix(".logs")
    require_rates(results, logs)
    # Row after row, not family after family: what the first compiles, the later ones find.
    named = [(row, case) for row in arguments.rows for case in (cases_of(name, [row], arguments.small)[row] for name in arguments.families)]
    extra = ("--window", str(arguments.window), *(("--warmup", str(arguments.warmup)) if arguments.warmup is not None else ()))
    left_s = arguments.limit_s - (time.monotonic() - began_s)
    on = seats(1, arguments.rows_per_gpu) if torch.cuda.is_available() else ()
    launch = Launch(logs, left_s, extra, arguments.cache, total_s=left_s, seats=on)
    asks = {case.key: ask_of(row, case, logs if arguments.look else None) for row, case in named}
    measure([case for _, case in named], results, launch, retry=arguments.retry, asks=asks)


def require_rates(results: Results, logs: Path) -> DeviceSpec:
    """This machine's rates, measured first where they are not there. Raises CannotRun."""
    here = machine()
    if (found := results.device_of(here)) is None:
        with stage("measuring this machine"):
            results.put_device(here, found := measured_rates(logs))
    return found


def measured_rates(logs: Path) -> DeviceSpec:
    """This machine's rates, measured in a process of its own. Raises CannotRun."""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / "rates.json"
    command = [sys.executable, "-m", "hytrain_fx", "profile", "--seconds", str(RATES_S), "--megabytes", str(RATES_MB), "--out", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=RATES_LIMIT_S, env=environment())
        return DeviceSpec.from_json(path.read_text())
    except (subprocess.SubprocessError, OSError, ConfigError) as error:
        told = getattr(error, "stderr", None) or error
        raise CannotRun(f"this machine's rates were not measured ({' '.join(command[1:])}): {told}") from error


def _names(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Reads an argument that lists names of `known`."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, expected names of {', '.join(known)}")
        return found

    return names
