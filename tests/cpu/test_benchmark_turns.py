"""Rows side by side: each on its seat, timed alone, its wait no start-up."""

from __future__ import annotations

import fcntl
import itertools
import os
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from benchmarks import steps
from benchmarks.case import CannotRun, Case
from benchmarks.results import Results
from benchmarks.runner import Launch, measure
from benchmarks.turns import Seat, Turn, entered, seats

from .test_benchmarks import TINY, row_of


def test_rows_run_side_by_side_each_on_its_own_gpu_and_cores(tmp_path: Path) -> None:
    """Every row runs once, on one of the seats, and both seats are used."""
    core = min(os.sched_getaffinity(0))
    barrier = f"""
        import json, os, pathlib, sys, time
        here = pathlib.Path({str(tmp_path)!r})
        (here / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
        while not all((here / gpu).exists() for gpu in "47"):
            time.sleep(0.01)
        seat = {{"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "cores": list(os.sched_getaffinity(0))}}
        row = {row_of(TINY[0], 1.0)!r} | seat | {{"mode": sys.argv[1]}}
        print(json.dumps(row))
    """
    script = tmp_path / "row.py"
    script.write_text(textwrap.dedent(barrier))
    launch = Launch(tmp_path / "logs", limit_s=60.0, command=(sys.executable, str(script)), seats=(Seat("4", (core,)), Seat("7", (core,))))
    results = Results(tmp_path / "results.json")
    measure(TINY, results, launch, tell=lambda _: None)
    rows = [row for case in TINY if (row := results.measured(case))]
    assert len(rows) == len(TINY)
    assert {row["gpu"] for row in rows} == {"4", "7"}
    assert all(row["cores"] == [core] for row in rows)


def turn_at(path: Path) -> Turn:
    """The turn of a row that is there already, as its process has it."""
    with entered(path) as descriptor:
        return Turn(os.dup(descriptor))


def test_no_row_starts_beside_one_that_is_timed_alone(tmp_path: Path) -> None:
    """While a row is timed alone no other row's process begins, though seats are free.

    All rows get their turn.
    """
    script, log = tmp_path / "row.py", tmp_path / "log"
    script.write_text(textwrap.dedent(f"""
        import json, sys, time
        def note(what):
            with open({str(log)!r}, "a") as file:
                file.write(f"{{what}} {{sys.argv[1]}} {{sys.argv[3]}}\\n")
        note("begins")
        from benchmarks.turns import Turn
        turn = Turn(int(sys.argv[sys.argv.index("--turn") + 1]))
        turn.wait_to_be_alone(sys.argv[1], "--shares-gpu" in sys.argv)
        note("alone")
        time.sleep(0.5)
        note("over")
        print(json.dumps({row_of(TINY[0], 1.0)!r}))
    """))
    core = min(os.sched_getaffinity(0))
    rows = [Case("floor", "tiny", batch, 32) for batch in range(1, 6)]
    launch = Launch(tmp_path / "logs", limit_s=60.0, command=(sys.executable, str(script)), seats=(Seat("0", (core,), True),) * 3)
    measure(rows, Results(tmp_path / "results.json"), launch, tell=lambda _: None)
    noted = [line.split()[0] for line in log.read_text().splitlines()]
    assert noted.count("begins") == noted.count("over") == len(rows)
    assert [follows for what, follows in itertools.pairwise(noted) if what == "alone"] == ["over"] * len(rows)


def test_a_row_with_host_states_is_timed_alone(tmp_path: Path) -> None:
    """A row with host states waits until every other row has ended or waits too.

    No other row begins meanwhile. A row without host states never waits.
    """
    path = tmp_path / "turn"

    def is_taken() -> bool:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    ours, floor = turn_at(path), turn_at(path)
    floor.wait_to_be_alone("floor")
    waiting = threading.Thread(target=ours.wait_to_be_alone, args=("ours",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    del floor  # its process ends
    waiting.join(30)
    assert not waiting.is_alive()
    assert is_taken()
    del ours
    assert not is_taken()


def test_of_rows_on_one_gpu_each_is_timed_alone(tmp_path: Path) -> None:
    """A row that leaves the host alone waits too, until the other row's process has ended."""
    floor, other = turn_at(tmp_path / "turn"), turn_at(tmp_path / "turn")
    waiting = threading.Thread(target=floor.wait_to_be_alone, args=("floor", True))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    del other
    waiting.join(30)
    assert not waiting.is_alive()


def test_seats_share_the_cores_and_want_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU gets as many cores, no core is given twice, and only visible GPUs are used.

    Several rows of one GPU have the same cores, and are told so.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert seats(2) == (Seat("5", (0, 1, 2, 3)), Seat("3", (4, 5, 6, 7)))
    assert seats(2, rows_per_gpu=2) == (Seat("5", (0, 1, 2, 3), True), Seat("3", (4, 5, 6, 7), True)) * 2
    with pytest.raises(CannotRun, match="found 2 visible GPUs"):
        seats(3)


def test_waiting_for_other_rows_is_no_start_up() -> None:
    """Waiting for other rows is taken off the warm-up, between whose steps it falls.

    The other phases stay, and a mode without start-up has none.
    """
    told = {"plan": {}, "startup": {"engine_us": 1e6, "warm_up_us": 9e6, "own_us": 10e6, "total_us": 30e6}}
    assert steps._without_waiting(told, 8e6) == {
        "plan": {}, "startup": {"engine_us": 1e6, "warm_up_us": 1e6, "own_us": 2e6, "total_us": 22e6}}
    assert steps._without_waiting({"plan": {}}, 8e6) == {"plan": {}}
