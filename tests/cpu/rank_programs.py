"""Drawn programs that several ranks run together, each on its own batches.

    python -m tests.cpu.rank_programs --programs 300 --seed 1
    python -m tests.cpu.rank_programs --programs 20 --seed 1 --endings
    python -m tests.cpu.rank_programs --programs 150 --seed 1 --sharded

Every rank runs the whole program, with hytrain_fx and then with torch alone, whose gradients are
averaged by hand. With two ranks every bit must agree; with more, the ranks must agree with each
other. In the programs of `--endings` one rank leaves or is interrupted: each other one must end
with the same bits or with RankError, and none may hang.

Drawing and shrinking are those of `programs.py`. Processes are started once for many programs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from .program_models import ADAMS, RANK_OPTIONS, Setup
from .program_rank_calls import ENDINGS
from .program_workers import Report, serve
from .programs import Differs, Found, Plant, Program, Workshop, drawn_setup, programs_of, search
from .rank_loops import begun

PER_SEED: Final = 15
WIDTHS: Final = (8, 20, 32)  # of 8 no matrix is cut; of 20 the last shard is shorter
TIME_LIMIT_S: Final = 45.0  # of the group; a rank may compile in that time, on cores that others use too
TIME_LIMIT_OF_ENDINGS_S: Final = 6.0
_MARGIN_S: Final = 15.0
_MOST_S: Final = 180.0  # for one program, with the model's compilation


def drawn_rank_setup(number: int, ranks: int = 2) -> Setup:
    """The setup of a seed.

    No parameter is in several graphs: each part of its gradient is averaged, which rounds
    otherwise than averaging the sum.
    """
    setup, draw = drawn_setup(number), random.Random(number)
    setup = replace(setup, width=draw.choice(WIDTHS), ranks=ranks, options=setup.options.replace("weights streamed", "weights sharded"))
    if setup.is_partly_eager:
        units = tuple(unit if unit != "shared" or setup.units.index(unit) == at else "linear" for at, unit in enumerate(setup.units))
        setup = replace(setup, tied=False, units=units)
    return setup


def drawn_sharded_setup(number: int, ranks: int = 2) -> Setup:
    """The same with sharded weights."""
    setup, draw = drawn_rank_setup(number, ranks), random.Random(number)
    optimizer = setup.optimizer if setup.is_adam else draw.choice(ADAMS)
    return replace(setup, dtype="bfloat16", optimizer=optimizer, options=draw.choice(list(RANK_OPTIONS)), width=draw.choice(WIDTHS[1:]))


@st.composite
def endings_of(draw: st.DrawFn, setup: Setup) -> Program:
    """Programs with one call after which a rank may be gone."""
    program = draw(programs_of(setup))
    calls, at = list(program.calls[:12]), draw(st.integers(0, 11))
    # In the others one rank alone makes a forward or looks, which sharded weights refuse.
    endings = [name for name in ENDINGS if name.startswith("one rank")] if setup.shards_weights else ENDINGS
    calls.insert(at, (draw(st.sampled_from(endings)), draw(st.integers(0, 11))))
    return replace(program, calls=tuple(calls))


class RankWorkshop(Workshop):
    """Keeps the processes of the ranks, which keep the compiled pair of the last setup."""

    def __init__(self, plant: Plant | None = None) -> None:
        super().__init__(plant)
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._setup: Setup | None = None
        self._time_limit_s = TIME_LIMIT_S

    def check(self, program: Program) -> None:
        """Run the program on all ranks. Raises Differs where one has found something wrong."""
        ending = any(name in ENDINGS for name, _ in program.calls)
        if ending or self._setup is None or self._setup.ranks != program.setup.ranks:
            self.close()
            self._start(program.setup, TIME_LIMIT_OF_ENDINGS_S if ending else TIME_LIMIT_S)
        elif self._setup != program.setup:
            self._drop_pair()
        self._setup = program.setup
        self.counts.update(name for name, _ in program.calls)
        reports = self._asked(program)
        try:
            _judge(reports, ending)
        except Differs:
            self.close(failed=any(of is None or of.error or of.gone for of in reports))
            raise
        if ending:
            self._kill()

    def close(self, failed: bool = False) -> None:
        """Close the ranks' pairs, and end them. Where one has failed they cannot close together."""
        if not failed and self._processes:
            self._drop_pair()
        self._kill()

    def _start(self, setup: Setup, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        pairs = [Pipe() for _ in range(setup.ranks)]
        self._connections = [mine for mine, _ in pairs]
        theirs = [of for _, of in pairs]
        folder = Path(self._folder.name)
        self._processes = begun(partial(serve, theirs, folder, self.plant), setup.ranks, folder, time_limit_s)
        for of in theirs:
            of.close()

    def _drop_pair(self) -> None:
        self.left += [f"after close of {self._setup} there are on rank {rank}: {'no answer' if of is None else of.left or of.error}"
                      for rank, of in enumerate(self._asked(None)) if of is None or of.left or of.error]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections, self._setup = [], [], None

    def _asked(self, program: Program | None) -> list[Report | None]:
        """What the ranks answer; None of one that has not in time, or that has died."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(program)
        reports: list[Report | None] = [None] * len(self._connections)
        missing, end_s = dict(zip(self._connections, range(len(reports)), strict=True)), time.monotonic() + _MOST_S
        while missing and time.monotonic() < end_s:
            for ready in wait(list(missing), timeout=1.0):
                assert isinstance(ready, Connection)
                rank = missing.pop(ready)
                with suppress(EOFError, OSError):
                    reports[rank] = report = ready.recv()
                    if report.error or report.gone:  # the others are to learn of it
                        end_s = min(end_s, time.monotonic() + self._time_limit_s + _MARGIN_S)
        for rank in missing.values():
            reports[rank] = Report(error=f"hangs in\n{self._stack(rank)}")
        return reports

    def _stack(self, rank: int) -> str:
        with suppress(OSError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(1.0)
        return (Path(self._folder.name) / f"{rank}.stack").read_text()[-6000:]


def _judge(reports: Sequence[Report | None], ending: bool) -> None:
    for rank, report in enumerate(reports):
        if report is None:
            raise Differs(f"rank {rank} has died")
        if report.differs:
            raise Differs(f"rank {rank}, {report.differs}")
    told = [of for of in reports if of is not None]
    if any(of.error and not (ending and _is_of_ranks(of)) for of in told):
        raise Differs("; ".join(f"rank {rank}: {of.error or 'left' * of.gone or 'ended well'}{of.closed and f', close: {of.closed}'}"
                                for rank, of in enumerate(told)))
    if any(of.error or of.gone for of in told):
        return
    for what in ("raised", "digest"):
        if len({getattr(of, what) for of in told}) > 1:
            raise Differs(f"the ranks differ in {what}: {[getattr(of, what) for of in told]}")


def _is_of_ranks(report: Report) -> bool:
    """Whether a rank was told that another has failed, also where it closed its model then."""
    return "RankError: " in report.error and (not report.closed or report.closed.startswith("RankError: "))


def main() -> int:
    parser = argparse.ArgumentParser(description="Drawn training loops of several ranks, bit for bit.")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="the first; each model takes the next")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--endings", action="store_true", help="one rank leaves or is interrupted")
    parser.add_argument("--sharded", action="store_true", help='all with weights="sharded"')
    parser.add_argument("--per-seed", type=int, default=PER_SEED)
    parser.add_argument("--shrink-s", type=float, default=120.0)
    of = parser.parse_args()
    total = Found()
    for number in range(of.seed, of.seed + math.ceil(of.programs / of.per_seed)):
        begin_s = time.monotonic()
        setup = (drawn_sharded_setup if of.sharded else drawn_rank_setup)(number, of.ranks)
        found = search(number, of.per_seed, setup, RankWorkshop, of.shrink_s,
                       endings_of if of.endings else programs_of)
        shown = "".join(f" FAILED {failure.error}\n{failure.program}" for failure in found.failures)
        print(f"seed {number}: {found.programs} programs, {time.monotonic() - begin_s:.0f} s{shown or ', ok'}", flush=True)
        total.programs += found.programs
        total.counts += found.counts
        total.failures += found.failures
    print(f"\n{total.programs} programs; calls: " + ", ".join(f"{name} {count}" for name, count in total.counts.most_common()))
    print(f"{len(total.failures)} failures")
    return int(bool(total.failures))


if __name__ == "__main__":
    raise SystemExit(main())
