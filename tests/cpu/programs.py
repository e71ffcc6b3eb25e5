"""A generator of programs: drawn training loops, run in lockstep on a plain model and on ours.

Every bit must agree.

    python -m tests.cpu.programs --programs 10000 --seed 1 --processes 16 [--device cuda]

A program is a value: what is compiled (`Setup`), what the engine is told, and a list of calls
(`program_calls.py`). hypothesis draws it and shrinks the failing ones; what is printed can be
pasted into a test (`check(Program(...))`). Programs of one seed share one compiled model, put back
to the start for each: compiling takes seconds, a program milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure

from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.foresight import Speculate

from .program_models import ADAMS, DTYPES, FOR_ADAM_ALONE, FOR_BF16_ALONE, OPTIMIZERS, OPTIONS, UNITS, Pair, Setup, Side, quick_compiling
from .program_rank_calls import kinds_of

PER_SEED = 25
_SHRINK_S = 60.0
_MOST_S = 600.0  # for one seed
Call = tuple[str, int]
Plant = Callable[[Pair], None]


@dataclass(frozen=True)
class Program:
    """A drawn loop.

    speculate  whether updates may begin before step()
    delays     microseconds by stage of the engine; with several ranks, of the last one's
    calls      kind and a number that the kind uses as it likes
    """

    setup: Setup = field(default_factory=Setup)
    speculate: Speculate = "auto"
    delays: tuple[tuple[str, int], ...] = ()
    calls: tuple[Call, ...] = ()


class Differs(AssertionError):
    """The two loops differ."""


# ---- drawing ----


def drawn_setup(number: int, device: str = "cpu") -> Setup:
    """The setup of a seed."""
    draw = random.Random(number)
    optimizers = OPTIMIZERS if device == "cpu" else ADAMS  # torch's own of others has other last bits on a GPU than on a CPU
    optimizer = draw.choice([*optimizers[:1] * 4, *optimizers[1:]])
    options = [name for name in OPTIONS if optimizer in ADAMS or name not in FOR_ADAM_ALONE]
    units = tuple(draw.choice(list(UNITS)) for _ in range(draw.randint(1, 5)))
    # Other optimizers than Adam keep no masters, so their reference in bf16 would be one more
    # class.
    dtypes = DTYPES if optimizer in ADAMS else [name for name in DTYPES if name != "bfloat16"]
    tied, dtype = draw.random() < 0.4, draw.choice(dtypes)
    options = [name for name in options if dtype == "bfloat16" or name not in FOR_BF16_ALONE]
    option = draw.choice(options)
    return Setup(units, tied, dtype, optimizer, option, 8 if device == "cpu" else draw.choice((8, 64, 256)), device=device)


@st.composite
def programs_of(draw: st.DrawFn, setup: Setup) -> Program:
    """Programs, mostly long ones; shrunk ones may be short."""
    weighted = [name for name, kind in kinds_of(setup).items() for _ in range(kind.weight)]
    calls = st.tuples(st.sampled_from(weighted), st.integers(0, 11))
    delays = st.tuples(st.sampled_from([stage.name for stage in Stage]), st.sampled_from([200, 2000]))
    return Program(
        setup,
        draw(st.sampled_from(["auto", True, False])),
        tuple(dict(draw(st.lists(delays, min_size=draw(st.sampled_from([0, 2])), max_size=3))).items()),
        tuple(draw(st.lists(calls, min_size=draw(st.sampled_from([1, 8, 12, 16])), max_size=30))),
    )


# ---- running ----


class Workshop:
    """Keeps the compiled pair of the last setup."""

    def __init__(self, plant: Plant | None = None) -> None:
        self.plant = plant
        self._pair: Pair | None = None
        self.counts: Counter[str] = Counter()
        self.left: list[str] = []

    def check(self, program: Program) -> None:
        """Run the program on both sides. Raises Differs, naming the call, where they differ."""
        if self._pair is None or self._pair.setup != program.setup:
            self.close()
            self._pair = planted(program.setup, self.plant)
        whole = False
        try:
            _run(self._pair, program, self.counts)
            whole = True
        finally:
            if not whole:
                self.close(failed=True)

    def close(self, failed: bool = False) -> None:
        """Close the pair.

        Only programs that pass are asked what is left over: an error holds the frames that it came
        through.
        """
        if self._pair is None:
            return
        pair, self._pair = self._pair, None
        left = pair.close()
        if left and not failed:
            self.left.append(f"after close of {pair.setup} there are: {left}")


def planted(setup: Setup, plant: Plant | None) -> Pair:
    """A compiled pair, with a defect where one is given."""
    pair = Pair(setup)
    if plant is not None:
        pair.ours.planted = partial(plant, pair)
        pair.ours.planted()
    return pair


def check(program: Program) -> None:
    """Run one program on a pair of its own."""
    workshop = Workshop()
    with quick_compiling():
        workshop.check(program)
    workshop.close()
    assert not workshop.left, workshop.left[0]


def _run(pair: Pair, program: Program, counts: Counter[str]) -> None:
    with started_again(pair, program):
        for number, call in enumerate(program.calls):
            counts[call[0]] += 1
            require_alike(pair, call, outcome(pair.ours, call), f"call {number}, {call}")
        compare(pair, "at the end")


@contextmanager
def started_again(pair: Pair, program: Program) -> Iterator[None]:
    """Around a program: the pair is at the start, and the engine does what the program says."""
    pair.restart()
    session = pair.ours.session
    if session.engine.name == "native" and not session.config.streamed:
        session.speculate(program.speculate, session.table.device.type == "cuda")
    for stage, mean_us in program.delays if pair.ours.chosen(-1) else ():
        session.engine.set_delay(Stage[stage], mean_us)
    del session
    try:
        yield
    finally:
        for slow in Stage:
            pair.ours.session.engine.set_delay(slow, 0)


def require_alike(pair: Pair, call: Call, found: Any, where: str) -> None:
    """Make the call on the plain side too: its outcome is what was found on ours.

    Where ours has refused the call as documented, the plain loop leaves it out. Raises Differs.
    """
    if isinstance(found, kinds_of(pair.setup)[call[0]].refusals):
        return
    expected = outcome(pair.plain, call)
    if isinstance(found, BaseException) or isinstance(expected, BaseException):
        if type(found) is not type(expected):
            raise Differs(f"{where}: {_words(found)} instead of {_words(expected)}") from (found if isinstance(found, Exception) else None)
    elif repr(found) != repr(expected):
        raise Differs(f"{where}: {found} instead of {expected}")


def outcome(side: Side, call: Call) -> Any:
    """What one side gives or raises."""
    name, at = call
    try:
        return _numbers(kinds_of(side.setup)[name].run(side, at))
    except (Exception, KeyboardInterrupt) as error:
        return error


def _numbers(found: Any) -> Any:
    """What a call gave, with its losses as numbers."""
    if isinstance(found, tuple):
        return tuple(map(_numbers, found))
    return float(found) if isinstance(found, torch.Tensor) else found


def _words(found: Any) -> str:
    return f"{type(found).__name__}({first_line(found)})" if isinstance(found, BaseException) else f"{found}"


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class Seen:
    """All that ours has. Ranks are asked for it before anything is compared."""

    saved: dict[str, Any]
    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor]

    @staticmethod
    def of(side: Side) -> Seen:
        saved = side.optimizer.state_dict()
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in side.parameters]
        return Seen(saved, gradients, [p.detach().clone() for p in side.parameters])


def compare(pair: Pair, where: str, seen: Seen | None = None) -> None:
    """Every weight, gradient, state and group has the same bits. Raises Differs."""
    plain, seen = pair.plain, Seen.of(pair.ours) if seen is None else seen
    saved = seen.saved
    names = [name for name, _ in plain.model.named_parameters()]
    for name, grad, weight, q in zip(names, seen.gradients, seen.weights, plain.parameters, strict=True):
        _require_same(grad, q.grad, f"{where}: the gradient of {name}")
        _require_same(weight, q.detach(), f"{where}: {name}")
    of_plain = plain.optimizer.state_dict()
    for number, (group, expected) in enumerate(zip(saved["param_groups"], of_plain["param_groups"], strict=True)):
        for key in ("lr", "weight_decay", "betas", "params"):
            if key in expected and group[key] != expected[key]:
                raise Differs(f"{where}: {key} of group {number} is {group[key]} instead of {expected[key]}")
    parameters = [p for group in plain.optimizer.param_groups for p in group["params"]]
    if saved["state"].keys() != of_plain["state"].keys():
        raise Differs(f"{where}: there are states of {sorted(saved['state'])} instead of {sorted(of_plain['state'])}")
    for number, expected in of_plain["state"].items():
        of_reference = _adam_entry(parameters[number], expected) if pair.setup.is_adam else expected
        for key, value in of_reference.items():
            if key in saved["state"][number] or not pair.setup.is_adam:
                _require_same(saved["state"][number][key], value, f"{where}: {key} of state {number}")


def _adam_entry(p: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """What HandAdam keeps, in torch's names.

    Its master follows a written weight only at the next step, so the written values are put in
    here.
    """
    names = {"step": "step", "m": "exp_avg", "v": "exp_avg_sq", "vmax": "max_exp_avg_sq"}
    master = torch.where(entry["master"].to(p.dtype) == p.detach(), entry["master"], p.detach().float())
    return {new: entry[old] for old, new in names.items()} | {"master": master}


def _require_same(found: Any, expected: Any, what: str) -> None:
    if found is None or expected is None:
        if found is not expected:
            raise Differs(f"{what} is {'not there' if found is None else 'there'}")
        return
    found, expected = torch.as_tensor(found).cpu(), torch.as_tensor(expected).cpu()
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        raise Differs(f"{what}: {found} instead of {expected}")
    if not torch.equal(found.nan_to_num(), expected.nan_to_num()):
        raise Differs(f"{what}: {(found != expected).sum()} of {found.numel()} differ, by {(found - expected).abs().max()}")


# ---- searching ----


@dataclass(frozen=True)
class Failure:
    """A shrunk program and its error.

    `alone`: whether it also fails on a pair that no other program has used.
    """

    seed: int
    program: str
    error: str
    alone: bool


@dataclass
class Found:
    """What a search gives."""

    programs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def search(number: int, programs: int = PER_SEED, setup: Setup | None = None, make: Callable[[], Workshop] = Workshop,
           shrink_s: float = _SHRINK_S, drawn: Callable[[Setup], st.SearchStrategy[Program]] = programs_of) -> Found:
    """Draw programs from this seed until one fails; shrink it for some time."""
    setup = drawn_setup(number) if setup is None else setup
    workshop, found = make(), Found()
    failed: dict[Program, Exception] = {}
    last: list[Program] = []
    first_failed_s: list[float] = []

    @seed(number)
    @settings(max_examples=programs, deadline=None, database=None, derandomize=False, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck), print_blob=False)
    @given(drawn(setup))
    def one(program: Program) -> None:
        if program in failed:
            last.append(program)
            raise failed[program]
        if first_failed_s and time.monotonic() - first_failed_s[0] > shrink_s:
            return  # shrunk enough
        if not first_failed_s:
            found.programs += 1
        try:
            workshop.check(program)
        except Exception as error:
            failed[program] = error
            last.append(program)
            first_failed_s.append(time.monotonic())
            raise

    with quick_compiling():
        try:
            one()
        except (Exception, FlakyFailure):
            if not last:
                raise
            smallest = last[-1]
            found.failures.append(Failure(number, text(smallest), _described(failed[smallest]), _fails(smallest, make())))
        workshop.close()
    found.counts = workshop.counts
    if not found.failures:
        found.failures = [Failure(number, text(Program(setup)), left, True) for left in workshop.left]
    return found


def _fails(program: Program, workshop: Workshop) -> bool:
    try:
        workshop.check(program)
    except Exception:
        return True
    finally:
        workshop.close()
    return False


def _described(error: BaseException) -> str:
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" (from {type(cause).__name__}: {first_line(cause)})" if cause else "")


def text(program: Program) -> str:
    """Python that makes the program."""
    whole = replace(program, calls=())
    head = repr(whole)[: -len("calls=())")]
    return head + "calls=(\n" + "".join(f"    {call!r},\n" for call in program.calls) + "))"


# ---- the command ----


def _worker(first: int, seeds: int, programs: int, device: str) -> None:
    """One line of JSON a seed."""
    torch.use_deterministic_algorithms(device != "cpu")
    for number in range(first, first + seeds):
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        found = search(number, programs, drawn_setup(number, device))
        print(json.dumps({"seed": number, "programs": found.programs, "counts": found.counts, "took_s": time.monotonic() - begin_s,
                          "cpu_s": time.process_time() - begin_cpu_s,
                          "failures": [vars(failure) for failure in found.failures]}), flush=True)


def _in_a_process(first: int, seeds: int, programs: int, device: str) -> Found:
    """Run seeds in a process of their own, so that a crash is a failure of the seed it came in.

    Each seed is reported when it ends.
    """
    command = [sys.executable, "-m", "tests.cpu.programs", "--worker", str(seeds), "--seed", str(first), "--programs", str(programs),
               "--device", device]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    total, done, killed = Found(), 0, threading.Event()
    with tempfile.TemporaryFile("w+") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=env) as process:

        def kill() -> None:
            killed.set()
            process.kill()

        limit = _started(kill)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"seed"'):
                limit.cancel()
                limit = _started(kill)
                done += 1
                _add(total, json.loads(line))
        limit.cancel()
        process.wait()
        err.seek(0)
        told = err.read()[-2000:] + (f"\nkilled after {_MOST_S:.0f} s" if killed.is_set() else "")
    if done < seeds:
        lost = first + done
        not_run = ", ".join(map(str, range(lost + 1, first + seeds)))
        after = f"; not run after it: seed {not_run}" if not_run else ""
        total.failures.append(
            Failure(lost, repr(drawn_setup(lost, device)), f"the process ended with {process.returncode}{after}: {told}", True))
    return total


def _started(kill: Callable[[], None]) -> threading.Timer:
    """Call `kill` when the time for one seed is over."""
    timer = threading.Timer(_MOST_S, kill)
    timer.daemon = True
    timer.start()
    return timer


def _add(total: Found, read: dict[str, Any]) -> None:
    """Count and show what a worker has reported of a seed."""
    total.programs += read["programs"]
    total.counts.update(read["counts"])
    total.failures += [Failure(**failure) for failure in read["failures"]]
    shown = "".join(f" FAILED {failure['error']}\n{failure['program']}" for failure in read["failures"])
    took = f"{read['took_s']:.1f} s, {read['cpu_s']:.1f} s of it computing"
    print(f"seed {read['seed']}: {read['programs']} programs, {took}{shown or ', ok'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drawn training loops on a plain model and on ours, bit for bit.")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="the first; each model takes the next")
    parser.add_argument("--per-seed", type=int, default=PER_SEED, help=f"programs of one compiled model (default: {PER_SEED})")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no seed after so many seconds")
    parser.add_argument("--device", default="cpu", help="where the models are: cpu (default) or cuda")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    of = parser.parse_args()
    if of.worker:
        _worker(of.seed, of.worker, of.programs, of.device)
        return 0
    seeds = -(-of.programs // of.per_seed)
    each = 2 if seeds >= 8 * of.processes else 1  # a process takes seconds to begin, and a seed up to minutes
    starts = range(of.seed, of.seed + seeds, each)
    begin_s = time.monotonic()
    not_begun: list[int] = []

    def run(at: int) -> Found:
        count = min(each, of.seed + seeds - at)
        if time.monotonic() - begin_s < of.limit_s:
            return _in_a_process(at, count, of.per_seed, of.device)
        not_begun.extend(range(at, at + count))
        return Found()

    with ThreadPoolExecutor(of.processes) as pool:
        parts = list(pool.map(run, starts))
    counts = sum((part.counts for part in parts), Counter[str]())
    failures = [failure for part in parts for failure in part.failures]
    print(f"\n{sum(part.programs for part in parts)} programs of seeds {of.seed} to {of.seed + seeds - 1} in "
          f"{time.monotonic() - begin_s:.0f} s; calls: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))
    for failure in failures:
        print(f"\nseed {failure.seed}: {failure.error}\n" + ("" if failure.alone else "(only after other programs of its seed)\n")
              + failure.program)
    if not_begun:
        print(f"\nnot begun within {of.limit_s:.0f} s: {len(not_begun)} seeds, {min(not_begun)} to {max(not_begun)}")
    print(f"\n{len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
