"""The cases side by side: missing rows are run, then the table is written.

The files are results.json, table.md and table.png. `--list` names the cases. Without a CASE nothing
is run, only drawn.

    python -m benchmarks table --out DIR 3b-host 3b-clip

Each row runs in a process of its own. A row that fails is shown with its reason; the others run.
Rows in results.json are not run again, so that a table that was broken off goes on where it
stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.case import CannotRun
from benchmarks.cases import CASE_SETS, CaseSet, named, rows_of
from benchmarks.markdown import claims_table, energy_table, failures, machines, rows_table, startup_table
from benchmarks.plots import draw_step_times
from benchmarks.results import Results
from benchmarks.runner import Launch, measure
from benchmarks.turns import seats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks table`."""
    parser.add_argument("case", nargs="*", metavar="CASE", help=f"all, {', '.join(CASE_SETS)}")
    parser.add_argument("--list", action="store_true", help="print the cases and their rows, run nothing")
    parser.add_argument("--skip-peers", action="store_true", help="leave out the rows of other packages")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every command has that runs rows."""
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results.json, tables and plots")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds a row may take, compiling included")
    parser.add_argument("--total-s", type=float, default=None, help="seconds for all rows; the next call runs what is missing then")
    parser.add_argument("--window", type=int, default=10, help="steps in one of the three windows; less than 10 is marked as short")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window")
    parser.add_argument("--idle", action="store_true", help="also trace three steps of each row for the GPU's idle time")
    parser.add_argument("--again", action="store_true", help="run all rows, also those that are there")
    parser.add_argument("--retry", action="store_true", help="run the rows again that failed")
    parser.add_argument("--gpus", type=int, default=None,
                        help="run rows on so many GPUs of this machine: they compile side by side and are timed one at a time")
    parser.add_argument("--rows-per-gpu", type=int, default=1, metavar="N",
                        help="with --gpus: so many rows compile on one GPU at once, whose memory has to hold them all")
    parser.add_argument("--cache", type=Path, default=None, help="TORCHINDUCTOR_CACHE_DIR of the rows (default: torch's own)")


def launch_of(arguments: argparse.Namespace) -> Launch:
    """How the command line wants rows to be run."""
    extra = ["--window", str(arguments.window)]
    extra += ["--warmup", str(arguments.warmup)] if arguments.warmup is not None else []
    extra += ["--idle"] if arguments.idle else []
    if arguments.rows_per_gpu < 1 or (arguments.rows_per_gpu > 1 and arguments.gpus is None):
        raise CannotRun(f"found --rows-per-gpu {arguments.rows_per_gpu}, expected at least 1, and more only with --gpus")
    on = () if arguments.gpus is None else seats(arguments.gpus, arguments.rows_per_gpu)
    return Launch(arguments.out / "logs", arguments.limit_s, tuple(extra), arguments.cache, total_s=arguments.total_s, seats=on)


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing, then write table and plot. Raises CannotRun for an unknown case."""
    case_sets = named(arguments.case)
    if arguments.list:
        print(listing())
        return
    results = Results(arguments.out / "results.json")
    measure(rows_of(case_sets, peers=not arguments.skip_peers), results, launch_of(arguments), again=arguments.again, retry=arguments.retry)
    show(results, case_sets or list(CASE_SETS.values()), arguments.out)


def show(results: Results, case_sets: Sequence[CaseSet], out: Path) -> None:
    """Write table.md and table.png of what is in the results, and print the former."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(results, case_sets)
    (out / "table.md").write_text(text)
    draw_step_times(results, out / "table.png")
    print(text)


def markdown(results: Results, case_sets: Sequence[CaseSet]) -> str:
    """Machines, rows by model and batch, claims, and what failed."""
    groups: dict[tuple[str, int, int, bool], None] = dict.fromkeys(
        (case.size, case.batch, case.sequence, case.checkpointing) for case, _ in results.all_measured())
    parts = [f"# Step times\n\n{machines(results)}"]
    for group in groups:
        cases = [case for case, _ in results.all_measured() if (case.size, case.batch, case.sequence, case.checkpointing) == group]
        size, batch, sequence, checkpointing = group
        title = f"{size}, {batch} x {sequence} tokens" + (", activations recomputed" if checkpointing else "")
        parts.append(f"## {title}\n\n{rows_table(results, cases)}")
    sections = (claims_table(results, case_sets), energy_table(results), startup_table(results), failures(results))
    parts += [section for section in sections if section]
    return "\n\n".join(parts) + "\n"


def listing() -> str:
    """The cases by name, with their rows."""
    return "\n".join(f"{name}: {case_set.title}" + "".join(f"\n    {row.key}" for row in case_set.rows)
                     for name, case_set in CASE_SETS.items())
