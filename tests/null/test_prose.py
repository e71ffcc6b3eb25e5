"""Prose in Markdown has at most 100 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]
WIDEST = 100
# Code, comments, tables, pictures and headings are as wide as they need to be.
FREE = re.compile(r"^( {4,}\S|\||!\[|<|#|:::)")
FENCED = re.compile(r"^```.*?^```|^<!--.*?^-->", re.MULTILINE | re.DOTALL)
UNBROKEN = re.compile(r"^\s*(?:[-*] |\d+\. )?\S+$")  # one word, a link say, that no line can break


def wide_lines(text: str) -> list[str]:
    """Lines of prose that are too long."""
    return [line for line in FENCED.sub("", text).splitlines() if len(line) > WIDEST and not FREE.match(line) and not UNBROKEN.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_has_at_most_a_hundred_columns(page: Path) -> None:
    """Wrap a line at a space."""
    assert wide_lines(page.read_text()) == []


def test_code_and_tables_may_be_wider() -> None:
    """Of a page only its prose counts, lists among it."""
    long = "word " * 30
    page = f"| {long} |\n\n    {long}\n\n```text\n{long}\n```\n\n<!-- python\n{long}\n-->\n\n- {long}\n  {long}\n"
    assert wide_lines(page) == [f"- {long}", f"  {long}"]
