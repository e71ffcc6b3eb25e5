"""Several ranks train one model, each on its own batches: ours beside PyTorch's ways, as a table.

    python -m benchmarks ranks --gpus 2 --size 3b --batch 4 --out ranks.json
    python -m benchmarks ranks --gpus 2 --file benchmarks/two_gpus.rows --together 4
    python -m benchmarks ranks --gpus 2 --size 1b --sequence 512 --rows by_hand host --bits 100
    python -m benchmarks ranks --gpus 2 --size tiny --batch 1 --sequence 32     # CPUs, gloo

Each row is started by torchrun: a process a GPU, cores in equal blocks. A step is wall time over a
window without synchronisation, ended by a full drain and a barrier of all ranks; three windows.
Rows in the file are not run again. With --together so many rows compile side by side, and then each
is timed while all others stand still. A line of --file has a row, its size and its own --batch,
--option and so on, and what it takes at most: --gpu-gb on each GPU, --host-gb for all its ranks.

    floor          DistributedDataParallel, compiled: forward, backward, mean of the gradients
    ddp            the same with fused AdamW on fp32 masters, on every GPU
    by_hand        compiled, gradients averaged one by one, AdamW(foreach=True): the bits of ours
    fsdp2          fully_shard, blocks compiled, fp32 parameters, bf16 compute
    fsdp2_offload  the same with CPUOffloadPolicy
    zero2_offload  DeepSpeed ZeRO-2 with the optimizer on the CPU, compiled, bf16 parameters
    zero3_offload  the same with ZeRO-3
    host           ours, gpu_states=0.0
    quarter        ours, gpu_states=0.25
    solved         ours, as it comes
    clipped        ours, gpu_states=0.0, clipped to 1.0 (--scaled-every N: one step in N)
    host_bf16      ours, gpu_states=0.0, moments="bf16"
    sharded        ours, weights="sharded"; a Llama is loaded tensor by tensor, and whole nowhere
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import one_rank
from benchmarks.case import CannotRun
from benchmarks.machine import machine, machine_text
from benchmarks.markdown import table
from benchmarks.one_rank import OURS, ROWS, SCALED_EVERY, RankRow, compiled_file
from benchmarks.rows import LineParser, lines_in
from benchmarks.runner import environment, file_name, in_threads, memory_here
from benchmarks.turns import Ask, Rounds
from hytrain_fx.forecast.bench.process import row_in, run_to_end, why_none
from hytrain_fx.forecast.bench.windows import OUR_WARMUP_STEPS

_OTHERS_WARMUP_STEPS = 6
_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks ranks`."""
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="ranks; without GPUs they train on the CPU")
    parser.add_argument("--size", default="3b", help="a Llama shape or a family of the zoo")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--file", type=Path, default=None, help="the rows, one a line, instead of --size and --rows")
    _add_row_arguments(parser)
    parser.add_argument("--together", type=int, default=1, metavar="N", help="so many rows compile side by side")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds for one row")
    parser.add_argument("--out", type=Path, default=Path("ranks.json"), help="the rows; what each of them prints is beside it")
    parser.add_argument("--look", action="store_true",
                        help="ours, timed: a recorded step and explain's text of each rank go to the row's log, a Chrome trace beside it")
    parser.add_argument("--rank-of", choices=ROWS, default=None, help=argparse.SUPPRESS)  # what torchrun starts
    parser.add_argument("--turn", type=Path, default=None, help=argparse.SUPPRESS)


def _add_row_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=4, help="sequences on each rank")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in one")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="ours: option of hytrain_fx.compile")
    parser.add_argument("--scaled-every", type=int, default=1, metavar="N", help="clipped: only one step in N is scaled")
    parser.add_argument("--window", type=int, default=10, help="steps in one of the three windows")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window")
    parser.add_argument("--bits", type=int, default=0, metavar="STEPS",
                        help="time nothing: train so many steps, of ours with odd ranks slowed, and compare all weights' bits with by_hand")


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing, and print the table. Raises CannotRun."""
    if arguments.rank_of is not None:
        one_rank.run(_row(arguments.rank_of, arguments.size, arguments), arguments.turn, arguments.out if arguments.look else None)
    if arguments.gpus < 2:
        raise CannotRun(f"found --gpus {arguments.gpus}, expected at least 2; for one GPU: python -m benchmarks table")
    if torch.cuda.is_available() and torch.cuda.device_count() < arguments.gpus:
        raise CannotRun(f"found {torch.cuda.device_count()} GPUs, expected {arguments.gpus}")
    if arguments.file is None:
        asked = [(_row(name, arguments.size, arguments), Ask()) for name in arguments.rows]
    else:
        asked = list(rows_in(arguments.file.read_text()))
    rows: dict[str, dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    _measure(asked, rows, arguments)
    print(ranks_markdown(rows))


def rows_in(text: str) -> Iterator[tuple[RankRow, Ask]]:
    """The rows of a file, in its order. Raises CannotRun for a line that names none."""
    for named, words in lines_in(text):
        with named:
            parsed = LineParser(_add_line_arguments).parse_args(words)
            if parsed.scaled_every != 1 and parsed.row != "clipped":
                raise CannotRun(f"--scaled-every is for clipped, found row {parsed.row}")
        yield _row(parsed.row, parsed.size, parsed), Ask(gpu_gb=parsed.gpu_gb, host_gb=parsed.host_gb)


def _add_line_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("size")
    _add_row_arguments(parser)


def _row(name: str, size: str, arguments: argparse.Namespace) -> RankRow:
    warmup = OUR_WARMUP_STEPS if name in OURS else _OTHERS_WARMUP_STEPS
    return RankRow(name, size, arguments.batch, arguments.sequence, arguments.checkpointing, tuple(arguments.option), arguments.window,
                   warmup if arguments.warmup is None else arguments.warmup, arguments.bits,
                   arguments.scaled_every if name == "clipped" else 1)


def ranks_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as Markdown. Ratios are between rows of one boot of one machine, size and batch.

    Bits are compared with those of by_hand. That has no row of a model of which only shards fit:
    ours are compared with the first of them that trains alike.
    """
    lines = []
    for row in rows.values():
        if "error" in row:
            lines.append([row["row"], row["workload"], row["error"], *["-"] * 6])
            continue
        if "checksums" in row:
            compared, spread = _whose_bits(row, rows.values()), ""
        else:
            floor = _of_same_training("floor", row, rows.values())
            compared = "-" if floor is None else f"{row['step_s'] / floor['step_s']:.3f}"
            spread = f"{(max(row['windows_s']) - min(row['windows_s'])) / row['step_s']:.1%}"
        gpu_gb = "-" if row["gpu_gb"] is None else f"{row['gpu_gb']:.1f}"
        predicted = f"{row['predicted_step_s']:.4f}" if row.get("predicted_step_s") else "-"
        lines.append([row["row"], row["workload"], f"{row['step_s']:.4f}", spread, compared, predicted, gpu_gb, f"{row['host_gb']:.1f}",
                      row["plan"] or "-"])
    machines = dict.fromkeys(machine_text(row["machine"]) for row in rows.values())
    head = ("row", "model, batch a rank", "s a step", "spread", "of floor, or whose bits", "predicted s", "GPU GB, largest",
            "host GB, all ranks", "plan of rank 0")
    return "\n\n".join(["\n".join(f"- {of}" for of in machines), table(head, lines)])


def _whose_bits(row: Mapping[str, Any], rows: Collection[Mapping[str, Any]]) -> str:
    first = _of_same_training("by_hand", row, rows)
    if first is not None:
        return "its bits" if row["checksums"] == first["checksums"] else "**other bits**"
    first = next((of for of in _same_training(row, rows) if _arithmetic(of["row"]) == _arithmetic(row["row"]) is not None), row)
    if first is row:
        return "-"
    return f"bits of {first['row']}" if row["checksums"] == first["checksums"] else f"**other bits** than {first['row']}"


def _arithmetic(title: str) -> tuple[str, bool, str] | None:
    """What changes the bits of ours: moments, and which steps it clips; None: no row of ours."""
    name, *options = title.split()
    if name not in OURS:
        return None
    given = dict(option.split("=", 1) for option in options)
    return str(given.get("moments", OURS[name].get("moments", "fp32"))), name == "clipped", given.get(SCALED_EVERY, "1")


def _of_same_training(name: str, row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((of for of in _same_training(row, rows) if of["row"] == name), None)


def _same_training(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (of for of in rows if "error" not in of and (of["workload"], of["machine"]) == (row["workload"], row["machine"]))


def _measure(asked: Sequence[tuple[RankRow, Ask]], rows: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Run the rows that are missing, `--together` at once. Each is written when it is there."""
    def key(row: RankRow) -> str:
        return f"{row.title} {row.workload} on {arguments.gpus}"

    waiting = [(row, ask) for row, ask in asked if "step_s" not in rows.get(key(row), {})]
    memory, rounds, writing = memory_here(), Rounds(), threading.Lock()

    def run_rows(_: int) -> None:
        while waiting:
            with writing:
                taken = next(((row, ask) for row, ask in waiting if memory.take("", ask)), None)
                if taken is not None:
                    waiting.remove(taken)
            if taken is None:
                time.sleep(_POLL_S)
                continue
            row, ask = taken
            found = _row_of(row, arguments, rounds)
            with writing:
                memory.give("", ask)
                rows[key(row)] = found
                arguments.out.write_text(json.dumps(rows, indent=1))
            print(f"{key(row)}: {found.get('error') or str(found['step_s']) + ' s a step'}", flush=True)

    def stop() -> None:
        waiting.clear()
        rounds.stop()

    in_threads(run_rows, range(arguments.together), stop)


def _row_of(row: RankRow, arguments: argparse.Namespace, rounds: Rounds) -> dict[str, Any]:
    """Start the ranks of one row, and read what rank 0 prints."""
    name = file_name(f"{row.title} {row.workload}")
    turn = _Turn(rounds, arguments.out.with_suffix(f".{name}.turn"))
    looks = arguments.look and not row.bits  # a few steps are too few for a plan to look at
    look = ["--look", "--out", str(arguments.out.with_suffix(f".{name}.trace.json"))] if looks else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.gpus), "-m", "benchmarks",
               "ranks", *one_rank.arguments_of(row), *look, *(["--turn", str(turn.path)] if arguments.together > 1 else [])]
    log = arguments.out.with_suffix(f".{name}.log")
    env = environment() | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if row.bits else {})
    began_s = time.perf_counter()
    with log.open("w") as file, turn:
        status = run_to_end(command, file.fileno(), arguments.limit_s, env, may_go_on=turn)
    printed = log.read_text(errors="replace")
    found = row_in(printed) if status in (0, None) else None
    named = {"row": row.title, "workload": f"{row.workload}, {arguments.gpus} ranks", "machine": machine(),
             "wall_s": round(time.perf_counter() - began_s, 1)}
    return {**named, **(found if found is not None else {"error": why_none(status, printed, arguments.limit_s)})}


class _Turn:
    """One row among `rounds`: its ranks say by a file that they have compiled, and wait for one."""

    def __init__(self, rounds: Rounds, path: Path) -> None:
        self.path = path
        self._rounds = rounds
        self._compiled = self._timed = False

    def __enter__(self) -> None:
        self._unlink()
        self._rounds.begin()

    def __exit__(self, *_: object) -> None:
        self._rounds.end(compiled=self._compiled, timed=self._timed)
        self._unlink()

    def __call__(self, _: int) -> bool:
        """Asked again and again while the ranks run."""
        if not self._compiled and compiled_file(self.path).exists():
            self._compiled = True
            self._rounds.compiled()
        if self._compiled and not self._timed and self._rounds.is_next():
            self._timed = True
            self.path.touch()
        return True

    def _unlink(self) -> None:
        for path in (self.path, compiled_file(self.path)):
            path.unlink(missing_ok=True)
