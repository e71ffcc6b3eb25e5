"""The largest model, or the largest batch, that trains: found by trial, each in its own process.

    python -m benchmarks largest --out DIR --modes all_gpu,ours,ours:moments=bf16
    python -m benchmarks largest --out DIR --device-memory 24,48 --host-memory 64 --gpus 2
    python -m benchmarks largest --out DIR --search batch --sizes 3b --device-memory 24

The search begins at what is estimated to fit and ends where one trains and the next does not
(`benchmarks/search.py`). Trials are kept in trials.json: a call that was broken off, or ended by
--total-s, goes on where it stopped. Each is timed, and says what memory it was estimated to take
before it ran, and what it took. largest_model.md and .png (or largest_batch) show what was found.

With --gpus (and --rows-per-gpu) searches run side by side, one on each seat. A trial begins when
the memory of its caps is free. The largest that trains then runs once more, and is timed alone.

--device-memory holds torch's allocator to so many 10^9 bytes; the CUDA context is not part of that.
--host-memory ends a trial whose processes hold more. A model grows by layers of one width: the
widest of which one layer is at most 4 % of the model (--layer-share; --family: another width).
"""

from __future__ import annotations

import argparse
import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from benchmarks import estimates
from benchmarks.case import CannotRun, Case
from benchmarks.largest_table import Found, write
from benchmarks.llama import family_size
from benchmarks.results import Results, Row
from benchmarks.runner import Launch, in_threads, measure, memory_here
from benchmarks.search import Edge, search
from benchmarks.table import add_run_arguments, launch_of
from benchmarks.turns import Ask, Seat
from hytrain_fx.forecast.bench.process import lacked_memory
from hytrain_fx.forecast.device import DeviceSpec

TRIES = 8
LAYER_SHARE = 0.04  # then one layer more is less than 5 % of a model's memory
HEADS = (64, 48, 40, 32, 24, 16, 8, 4, 2)
_CONTEXT_GB = 1.0  # of the device, beside what its cap counts
_POLL_S = 0.5
_PLANS = 40  # enough for an edge that is 2^19 away
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|no plan fits|pinning [\d.]+ GiB of host memory failed", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks largest`."""
    parser.add_argument("--search", choices=("model", "batch"), default="model", help="what grows (default: model)")
    parser.add_argument("--batches", type=_whole, default=[1, 4], help="--search model: sequences in a step, as 1,4")
    parser.add_argument("--sizes", type=_words, default=["3b"], help="--search batch: models, as 3b,7b")
    parser.add_argument("--sequence", "--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--modes", type=_words, default=["all_gpu", "zero_offload", "ours"],
                        help="ways of training; options of ours after colons, as ours:moments=bf16")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--device-memory", type=_gigabytes, default=[None], metavar="GB,...", help="caps on the GPU's memory, as 24,48")
    parser.add_argument("--host-memory", type=_gigabytes, default=[None], metavar="GB,...", help="caps on the host's memory")
    parser.add_argument("--family", default="auto", help="--search model: w (N layers of N heads of 128), hH (N layers of H heads), auto")
    parser.add_argument("--layer-share", type=float, default=LAYER_SHARE,
                        help="--family auto: a layer is at most this share of the model; wider layers are fewer and compile sooner")
    parser.add_argument("--start", type=int, default=None, help="number of layers, or batch, of the first trial (default: the estimate)")
    parser.add_argument("--within", type=float, default=0.03, help="a search ends where the gap is this share of the largest, or 1")
    parser.add_argument("--tries", type=int, default=TRIES, help="trials of one search at most")
    parser.add_argument("--device", default=None, help="what the first trial is estimated from: a known device or a file (default: this "
                        "machine's memory)")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Search, then write table and figure of what is known.

    Raises CannotRun for trials side by side without caps.
    """
    launch = launch_of(arguments)
    if launch.seats and None in (*arguments.device_memory, *arguments.host_memory):
        raise CannotRun("found --gpus without caps, expected --device-memory and --host-memory: trials side by side share what they are "
                        "to use up; give both, or leave --gpus out")
    spec, results = estimates.spec_of(arguments.device), Results(arguments.out / "trials.json")
    trials = Trials(results, launch, spec, arguments.again, arguments.retry)
    found = _searched_all(list(axes(arguments, spec)), trials, launch.seats, arguments)
    print(write(found, results, arguments.out, f"largest_{arguments.search}"))


@dataclass(frozen=True)
class Axis:
    """A row whose model, or batch, grows. `family` names the models, None: the batch grows."""

    base: Case
    family: str | None

    def case(self, number: int) -> Case:
        """The row with so many layers, or sequences."""
        return replace(self.base, batch=number) if self.family is None else replace(self.base, size=family_size(self.family, number))

    def estimated(self, spec: DeviceSpec) -> int:
        """The largest number that is estimated to fit, 0 where none is.

        Bytes alone are counted fast; plans are solved near what they say only.
        """
        most = estimates.largest_number(lambda number: estimates.holds(self.case(number), spec))
        return search(most, lambda number: estimates.fits(self.case(number), spec), tries=_PLANS).trains or 0


def axes(arguments: argparse.Namespace, spec: DeviceSpec) -> Iterator[Axis]:
    """What is searched for, in order."""
    of_models = arguments.search == "model"
    for device_gb, host_gb, at, text in itertools.product(
            arguments.device_memory, arguments.host_memory, arguments.batches if of_models else arguments.sizes, arguments.modes):
        mode, *options = text.split(":")
        base = Case(mode, family_size("w", 1) if of_models else at, at if of_models else 1, arguments.sequence,
                    checkpointing=arguments.checkpointing, options=tuple(options), device_memory_gb=device_gb, host_memory_gb=host_gb)
        family = None if not of_models else widest(base, spec, arguments.layer_share) if arguments.family == "auto" else arguments.family
        yield Axis(base, family)


def widest(base: Case, spec: DeviceSpec, layer_share: float) -> str:
    """The widest family of which one layer is at most that part of the largest model that fits."""
    for heads in HEADS:
        axis = Axis(base, f"h{heads}")
        shape = estimates.shape_of(axis.case(max(axis.estimated(spec), 1)))
        if shape.units[1].params <= layer_share * shape.params:
            break
    return f"h{heads}"


class NotTried(Exception):
    """A search cannot go on; the message says why."""


class Trials:
    """Runs what is not known yet, and says whether it trained."""

    def __init__(self, results: Results, launch: Launch, spec: DeviceSpec, again: bool, retry: bool) -> None:
        """With `again` all trials run, with `retry` those that failed for another reason."""
        self.results = results
        self.spec = spec
        self._launch = launch
        self._again, self._retry = again, retry
        self._began_s = time.monotonic()
        self._memory, self._taking = memory_here(), threading.Lock()

    def train(self, case: Case, seat: Seat | None) -> bool:
        """Whether the row trains, on its seat among others.

        Raises NotTried where it fails, but not for want of memory, and where no time is left.
        """
        row = self.results.get(case)
        if row is None or self._again or (self._retry and not decides(row)):
            row = self._run(case, seat, alone=seat is None)
        if not decides(row):
            raise NotTried(f"{case.size}, batch {case.batch}: {row['error']}")
        return "error" not in row

    def time_alone(self, case: Case, seat: Seat | None) -> None:
        """Once more, for its speed, if others compiled beside it.

        The row that there was stays where it fails this time. Raises NotTried as `train` does.
        """
        row = self.results.get(case)
        if row is not None and row.get("beside_others") and "error" in self._run(case, seat, alone=True):
            self.results.put(case, row)

    @contextmanager
    def _room(self, case: Case, seat: Seat | None) -> Iterator[None]:
        """While a trial beside others has the memory of its caps, which it waits for."""
        if seat is None:
            yield
            return
        ask = Ask(gpu_gb=(case.device_memory_gb or 0.0) + _CONTEXT_GB, host_gb=case.host_memory_gb or 0.0)
        while not self._take(ask, seat):
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            with self._taking:
                self._memory.give(seat.gpu, ask)

    def _take(self, ask: Ask, seat: Seat) -> bool:
        with self._taking:
            return self._memory.take(seat.gpu, ask)

    def _run(self, case: Case, seat: Seat | None, *, alone: bool) -> Row:
        estimate = estimates.estimate_of(case, self.spec)
        if estimate is not None:
            print(f"{case.key}: estimated to take {estimate.device_bytes / 1e9:.1f} GB of the device, {estimate.host_bytes / 1e9:.1f} of "
                  "the host", flush=True)
        before, seats = self.results.get(case), () if seat is None else (seat,)
        extra = self._launch.extra if alone else (*self._launch.extra, "--beside-others")
        with self._room(case, seat):
            launch = replace(self._launch, total_s=self._left_s(case), seats=seats, extra=extra)
            measure([case], self.results, launch, again=True, tell=_tell)
        row = self.results.get(case)
        if row is None or row is before:
            raise NotTried("the time was over; call again for the rest")
        self.results.put(case, row := row | {"estimate": None if estimate is None else asdict(estimate)})
        return row

    def _left_s(self, case: Case) -> float | None:
        """Seconds for a trial; None: as many as it takes. Raises NotTried if it would not end."""
        total_s = self._launch.total_s
        if total_s is None:
            return None
        left_s = total_s - (time.monotonic() - self._began_s)
        took_s = max((row["wall_s"] for known, row in self.results.all_measured() if known.mode == case.mode), default=0.0)
        if left_s <= 0 or (left_s < took_s and left_s < 0.9 * total_s):
            raise NotTried("no time is left; call again for the rest")
        return left_s


def decides(row: Row) -> bool:
    """Whether a trial says that a row trains, or that it lacks memory."""
    why = row.get("error")
    return why is None or lacked_memory(why) or _NO_MEMORY.search(why) is not None


def _searched_all(asked: Sequence[Axis], trials: Trials, seats: Sequence[Seat], arguments: argparse.Namespace) -> list[Found]:
    """One search after the other, or one on each seat."""
    if not seats:
        return [_searched(axis, trials, None, arguments) for axis in asked]
    found: dict[int, Found] = {}
    waiting, taking = list(enumerate(asked)), threading.Lock()

    def next_one() -> tuple[int, Axis] | None:
        with taking:
            return waiting.pop(0) if waiting else None

    def searches(seat: Seat) -> None:
        while (one := next_one()) is not None:
            found[one[0]] = _searched(one[1], trials, seat, arguments)

    in_threads(searches, seats, waiting.clear)
    return [found[number] for number in sorted(found)]


def _searched(axis: Axis, trials: Trials, seat: Seat | None, arguments: argparse.Namespace) -> Found:
    estimated = axis.estimated(trials.spec)
    seen: dict[int, bool] = {}

    def trains(number: int) -> bool:
        seen[number] = trials.train(axis.case(number), seat)
        return seen[number]

    why = ""
    try:
        edge = search(arguments.start or estimated, trains, arguments.tries, arguments.within)
    except NotTried as stopped:
        why = str(stopped)
        edge = Edge(max((number for number, trained in seen.items() if trained), default=None),
                    min((number for number, trained in seen.items() if not trained), default=None), len(seen), found=False)
    if not edge.found and not why:
        why = f"not narrowed down, trials: {edge.trials}; give more --tries"
    if edge.found and edge.trains:
        with suppress(NotTried):  # the next call does
            trials.time_alone(axis.case(edge.trains), seat)
    best, failed, expected = (None if not number else axis.case(number) for number in (edge.trains, edge.fails, estimated))
    return Found(axis.base, axis.family is not None, best, failed, expected, edge.trials, why)


def _tell(text: str) -> None:
    print(text.removeprefix("1/1 "), flush=True)


def _words(text: str) -> list[str]:
    return text.split(",")


def _whole(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _gigabytes(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
