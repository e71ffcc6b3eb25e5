"""Measure the rows that a file lists, one a line; `-` reads standard input.

Then results.json, table.md and table.png are written.

    python -m benchmarks rows FILE --gpus 2 --rows-per-gpu 2 --out DIR

A line has the arguments of `steps` that make the case. After ` -- ` come further ones, which look
into it, and after ` # ` a remark. Lines may say how much memory a row takes at most (GB). With
--rows-per-gpu no row then begins whose memory others have: other rows by their lines, other
programs by what the system says is available.

    ours 7b --option gpu_states=0.25 --gpu-gb 75 --host-gb 100 -- --timeline 7b.json --explain
    floor 7b --gpu-gb 51
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

from benchmarks import steps
from benchmarks.case import CannotRun, Case
from benchmarks.results import Results
from benchmarks.runner import measure
from benchmarks.table import add_run_arguments, launch_of, show
from benchmarks.turns import Ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks rows`."""
    parser.add_argument("file", type=Path, help="the rows; - for standard input")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, write the table and its plot.

    Raises CannotRun for a wrong line, and for a file that cannot be read.
    """
    try:
        text = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotRun(f"found no rows in {str(arguments.file)!r} ({error}), expected a text file, a row on each line") from error
    rows = rows_in(text)
    results = Results(arguments.out / "results.json")
    measure([case for case, _ in rows], results, launch_of(arguments), again=arguments.again, retry=arguments.retry,
            asks={case.key: ask for case, ask in rows})
    show(results, (), arguments.out)


def rows_in(text: str) -> list[tuple[Case, Ask]]:
    """The rows of a file, in its order.

    Raises CannotRun for a line that `steps` would refuse, and for a case that is listed twice.
    """
    rows: dict[str, tuple[Case, Ask]] = {}
    for named, words in lines_in(text):
        at = words.index("--") if "--" in words else len(words)
        with named:
            parsed = LineParser(steps.add_case_arguments).parse_args(words[:at])
            case = steps.case_of(parsed)
            if case.key in rows:
                raise CannotRun("this case is there already; a file has each case once")
        rows[case.key] = (case, Ask(tuple(words[at + 1 :]), parsed.gpu_gb, parsed.host_gb))
    return list(rows.values())


def lines_in(text: str) -> Iterator[tuple[AbstractContextManager[None], list[str]]]:
    """Each line that has words: in whose context a CannotRun tells the line, and its words."""
    for number, line in enumerate(text.splitlines(), 1):
        if words := shlex.split(line, comments=True):
            yield _named(f"line {number}, {line.strip()!r}"), words


@contextmanager
def _named(line: str) -> Iterator[None]:
    try:
        yield
    except CannotRun as error:
        raise CannotRun(f"{line}: {error}") from error


class LineParser(argparse.ArgumentParser):
    """What a line takes, and what memory its row takes at most."""

    def __init__(self, add_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
        super().__init__(prog="a row", add_help=False)
        add_arguments(self)
        self.add_argument("--gpu-gb", type=float, default=0.0)
        self.add_argument("--host-gb", type=float, default=0.0)

    def error(self, message: str) -> NoReturn:
        """A line is no command line, so the caller says which line is wrong."""
        raise CannotRun(message)
