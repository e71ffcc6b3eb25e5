"""Rows that a file lists are read as `steps` reads them.

They begin only where there is memory for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.__main__ import main
from benchmarks.case import CannotRun, Case
from benchmarks.results import Results
from benchmarks.rows import rows_in
from benchmarks.runner import Launch, _host_gb_free, measure
from benchmarks.turns import Ask, Memory, Seat

TEXT = """
    # the smallest models
    ours tiny --batch 2 --option k=0 --option stream=0 --gpu-gb 75 --host-gb 100 -- --timeline a.json --explain
    floor tiny --batch 2    # its floor

    ours tiny --batch 2 --clip 1.0 --scaled-every 10
"""


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a folder, and bytes that are no text."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        assert main(["rows", str(file), "--out", str(tmp_path / "out")]) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"cannot run: found no rows in {str(file)!r} (")
        assert told.err.count("\n") == 1


def test_a_line_is_a_case_what_it_looks_into_and_what_it_takes() -> None:
    """A line has a case, options for `steps` after `--`, and the memory that it takes.

    Comments and empty lines give no case.
    """
    rows = rows_in(TEXT)
    assert rows == [
        (Case("ours", "tiny", 2, options=("k=0", "stream=0")), Ask(("--timeline", "a.json", "--explain"), 75.0, 100.0)),
        (Case("floor", "tiny", 2), Ask()),
        (Case("ours", "tiny", 2, clip=1.0, scaled_every=10), Ask()),
    ]


def test_the_rows_of_the_measurements_are_rows() -> None:
    """benchmarks/h200.rows lists each case once, and says what every row takes of the device."""
    rows = rows_in((Path(__file__).resolve().parents[2] / "benchmarks" / "h200.rows").read_text())
    assert len(rows) > 15
    assert all(0 < ask.gpu_gb < 139 for _, ask in rows)


@pytest.mark.parametrize(("line", "why"), [
    ("ours", "the following arguments are required: size"),
    ("theirs tiny", "invalid choice: 'theirs'"),
    ("ours tiny --explain", "unrecognized arguments: --explain"),
    ("floor tiny --option k=0", "--option is for ours"),
    ("ours tiny --batch 2 --option k=0 --option stream=0", "there already"),
])
def test_a_line_that_is_no_row_is_named(line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the line's number and text and what is wrong with it, and nothing is run."""
    with pytest.raises(CannotRun) as error:
        rows_in(TEXT + line)
    assert f"line 7, {line!r}: " in str(error.value)
    assert why in str(error.value)
    file = tmp_path / "rows.txt"
    file.write_text(TEXT + line)
    assert main(["rows", str(file), "--out", str(tmp_path)]) == 1
    assert "line 7" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


def test_memory_is_taken_and_given_back() -> None:
    """Rows share the host's memory, and each GPU has its own.

    A row that asks for more than all of it runs alone.
    """
    memory = Memory(100.0, 200.0)
    first, second, host = Ask(gpu_gb=60.0), Ask(gpu_gb=60.0), Ask(host_gb=150.0)
    assert memory.take("0", first)
    assert not memory.take("0", second)
    assert memory.take("1", second)
    assert memory.take("0", host)
    assert not memory.take("1", host)
    assert not memory.take("1", Ask(gpu_gb=500.0))
    for gpu, ask in (("0", first), ("1", second), ("0", host)):
        memory.give(gpu, ask)
    assert memory.take("1", Ask(gpu_gb=500.0))


def test_memory_that_other_programs_have_is_not_given() -> None:
    """A row begins only where memory is left beside what running rows have still to take.

    The first row begins anyway, and so does a row that asks for no host memory.
    """
    free_gb = 20.0
    asked: list[float] = []

    def free(asked_gb: float) -> float:
        asked.append(asked_gb)
        return free_gb

    memory = Memory(100.0, 200.0, free)
    assert memory.take("0", Ask(host_gb=60.0))
    free_gb = 50.0
    assert not memory.take("0", Ask(host_gb=60.0))
    free_gb = -5.0
    assert memory.take("0", Ask(gpu_gb=10.0)), "it asks for none"
    free_gb = 70.0
    assert memory.take("0", Ask(host_gb=60.0))
    free_gb = 500.0
    assert not memory.take("0", Ask(host_gb=90.0)), "rows have asked for the rest"
    assert asked == [60.0, 60.0], "the system is asked only where rows leave enough"


def test_what_rows_are_yet_to_take_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that rows have asked for and not yet taken is not free."""
    monkeypatch.setattr(runner, "available_host_bytes", lambda: 100_000_000_000)
    assert _host_gb_free(0.0) == 100.0
    before = _host_gb_free(60.0)
    taking = "taken = bytearray(b'1' * 400_000_000); print('taken', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", taking], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as row:
        assert row.stdout is not None
        assert row.stdout.readline() == b"taken\n"
        assert before + 0.39 < _host_gb_free(60.0) <= 100.0
        row.communicate(b"\n")


def test_a_row_waits_for_memory_and_others_pass(tmp_path: Path) -> None:
    """Two large rows never run at once, though there are seats.

    A small one runs beside the first, and each gets its own arguments.
    """
    cases = [Case("ours", "tiny", batch) for batch in (1, 2, 3)]
    row: dict[str, Any] = {"step_s": 1.0, "spread": 0.0, "window_steps": 10, "machine": {}}
    script = tmp_path / "row.py"
    script.write_text(textwrap.dedent(f"""
        import json, pathlib, sys, time
        here, batch = pathlib.Path({str(tmp_path)!r}), int(sys.argv[4])
        (here / f"begun{{batch}}").touch()
        while batch == 1 and not (here / "ended3").exists():  # the small one, listed last, has passed the second
            time.sleep(0.01)
        assert batch != 2 or (here / "ended1").exists()
        (here / f"ended{{batch}}").touch()
        print(json.dumps({row!r} | {{"batch": batch, "given": sys.argv[5:]}}))
    """))
    large = 0.6 * 1e6  # GB: of no host
    asks = {cases[0].key: Ask(("--idle",), host_gb=large), cases[1].key: Ask(("--explain",), host_gb=large)}
    core = min(os.sched_getaffinity(0))
    seats = tuple(Seat("0", (core,), shared=True) for _ in range(2))
    launch = Launch(tmp_path / "logs", limit_s=60.0, command=(sys.executable, str(script)), seats=seats)
    results = Results(tmp_path / "results.json")
    measure(cases, results, launch, tell=lambda _: None, asks=asks)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 3, [found.get("error") for found in rows]
    given = {found["batch"]: found["given"] for found in rows}
    assert "--idle" in given[1]
    assert "--explain" in given[2]
    assert "--idle" not in given[3]
