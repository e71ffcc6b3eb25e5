"""`hytrain-fx bench`: its arguments, and the rows one after the other, each in its own process.

The process of the command itself never uses the GPU: a row has all of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hytrain_fx.errors import ConfigError, HostMemoryError, HytrainError, PlanError
from hytrain_fx.forecast.command import Answer
from hytrain_fx.ir.named_files import require_writable
from hytrain_fx.progress import stage

if TYPE_CHECKING:
    from hytrain_fx.forecast.bench.comparison import Comparison, Row
    from hytrain_fx.forecast.bench.workload import Asked
    from hytrain_fx.forecast.doctor import Finding

_ITSELF = (sys.executable, "-m", "hytrain_fx")
_ABOUT = """Times steps of a model on this machine, without any of its weights.

    hytrain-fx bench --model path/to/config.json --tokens 8192 --sequence 2048
    hytrain-fx bench --model small.json --batch 1 --sequence 64 --steps 2      # also without a GPU

Rows: forward and backward alone; a compiled loop with everything on the device, where it fits; ours
with all states on the host; ours with the plan that it solves.
"""


def add_bench(commands: Any) -> None:
    """The command `bench`."""
    bench = commands.add_parser("bench", help="time a model on this machine: plain, all states on the host, plan solved",
                                description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_argument("--model", required=True, help="a config.json of transformers, its folder, a shape's name (llama-1.3b), a "
                       "model_type (gpt2: its default sizes), or package.module:factory, a function that returns a model and the inputs "
                       "of one step")
    bench.add_argument("--tokens", type=int, help="tokens in a step: --batch times --sequence")
    bench.add_argument("--batch", type=int, help="sequences (samples of images or recordings) in a step (default: 4)")
    bench.add_argument("--sequence", type=int, help="tokens in a sequence (default: the model's context, at most 2048)")
    bench.add_argument("--steps", type=int, default=10, help="steps in each of the three windows (default: 10)")
    bench.add_argument("--limit-s", type=float, default=900.0, help="seconds a row may take, compiling included (default: 900)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    bench.add_argument("--row", help=argparse.SUPPRESS)  # what the command starts for itself: one row, in this process
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> Answer:
    from hytrain_fx.forecast.bench.workload import Asked

    asked = Asked(args.model, args.tokens, args.batch, args.sequence)
    if args.row is not None:
        return _row(asked, args.row, args.steps)
    require_writable(args.json)
    if args.steps < 1 or not args.limit_s > 0:
        raise ConfigError(f"found --steps {args.steps} --limit-s {args.limit_s:g}, expected at least one step and more than 0 s")
    with _ended_by_sigterm():
        found = compare(asked, args.steps, args.limit_s)
    if args.json is not None:
        args.json.write_text(found.to_json(), encoding="utf-8")
    return Answer(found.text(), status=int(found.step_us("floor") is None))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As an exception it passes the code that ends the running row, which would outlive this."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def compare(asked: Asked, steps: int, limit_s: float) -> Comparison:
    """Look at the machine, then time every way. Raises ConfigError, UnsupportedError."""
    import torch

    from hytrain_fx.forecast.bench.comparison import Comparison
    from hytrain_fx.forecast.bench.row import WAYS
    from hytrain_fx.forecast.bench.workload import workload

    with stage("reading the model", quiet=True):  # what is wrong is told in one line
        of = workload(asked, torch.device("meta"))
    with stage("looking at this machine"):
        machine = _machine()
    rows: dict[str, Row] = {}
    for number, (way, about) in enumerate(WAYS.items(), 1):
        with stage(f"row {number} of {len(WAYS)}: {about.title}"):
            rows[way] = _row_of(asked, way, steps, limit_s)
        if "error" in rows["floor"]:
            break  # what no way can be without
    return Comparison(machine, of.name, of.params, of.count, of.counted, of.size, steps, rows)


def _machine() -> Sequence[Finding]:
    """What `doctor` finds. Raises ConfigError where training would not work."""
    from hytrain_fx.forecast.doctor import Finding, State

    run = subprocess.run([*_ITSELF, "doctor", "--json"], capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise ConfigError(f"this machine cannot be looked at: {run.stderr.strip()[-400:]}")
    findings = [Finding(**{**found, "state": State(found["state"])}) for found in json.loads(run.stdout)["findings"]]
    if bad := [found for found in findings if found.is_bad]:
        raise ConfigError(f"training would not work here: {bad[0].what}: {bad[0].found}; hytrain-fx doctor says what to do")
    return findings


def _row_of(asked: Asked, way: str, steps: int, limit_s: float) -> Row:
    from hytrain_fx.forecast.bench.process import row_in, run_to_end, why_none

    sizes = (("--tokens", asked.tokens), ("--batch", asked.batch), ("--sequence", asked.sequence))
    words = [word for name, value in sizes if value is not None for word in (name, str(value))]
    with tempfile.TemporaryFile("w+") as log:
        command = [*_ITSELF, "bench", "--model", asked.model, *words, "--steps", str(steps), "--row", way]
        status = run_to_end(command, log.fileno(), limit_s, os.environ)
        log.seek(0)
        printed = log.read()
    return (row_in(printed) if status in (0, None) else None) or {"way": way, "error": why_none(status, printed, limit_s)}


def _row(asked: Asked, way: str, steps: int) -> Answer:
    """One row as a line of JSON, or why there is none."""
    import torch

    from hytrain_fx.forecast.bench.process import CANNOT_RUN, NO_MEMORY
    from hytrain_fx.forecast.bench.row import measured

    try:
        return Answer(json.dumps(measured(asked, way, steps)))
    except torch.OutOfMemoryError as error:
        told = NO_MEMORY + ". ".join(str(error).split(". ")[1:3])
    except (HostMemoryError, PlanError) as error:
        told = NO_MEMORY + str(error)
    except HytrainError as error:
        told = " ".join(str(error).split())
    return Answer(f"{CANNOT_RUN}{told}", status=2)
