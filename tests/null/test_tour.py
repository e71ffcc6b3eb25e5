"""The tour of the code leads to code that is there, in few files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
ROWS = re.findall(r"^\| \d+\. [^|]*\| `([^`]+)` \| (.*) \|$", TOUR, re.MULTILINE)
STOPS = [(path, re.findall(r"`([\w.]+)`", names)) for path, names in ROWS]
MOST_FILES, MOST_LINES = 12, 3_700


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{of.name}" for of in node.body if isinstance(of, ast.FunctionDef | ast.AsyncFunctionDef))}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize(("path", "names"), STOPS, ids=[path for path, _ in STOPS])
def test_every_stop_is_there(path: str, names: list[str]) -> None:
    """The file exists, and the functions and classes that it is read for are in it."""
    assert names
    assert set(names) <= names_in(ROOT / path)


def test_the_tour_is_short() -> None:
    """At most twelve files, of not much more than three thousand lines in all."""
    files = {path for path, _ in STOPS}
    assert len(files) == len(STOPS) == MOST_FILES
    assert sum(len((ROOT / path).read_text().splitlines()) for path in files) <= MOST_LINES
