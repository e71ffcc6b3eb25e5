"""The findings of `doctor` as a table for a terminal, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hytrain_fx.forecast.doctor import Finding, State

_STYLES = {State.GOOD: "green", State.NOTE: "yellow", State.BAD: "bold red"}
_WIDTH = 120  # where nobody says how wide: a file, a pipe


def findings_text(findings: Sequence[Finding]) -> str:
    """A table, then the verdict, with the lines to do."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("", "", "found", "what it means"):
        table.add_column(head, overflow="fold")
    for found in findings:
        table.add_row(Text(found.state, _STYLES[found.state]), Text(found.what), Text(found.found), Text(found.meaning))
    return printed(table, "", Text("\n".join(_verdict(findings))))


def printed(*parts: Table | Text | str) -> str:
    """The parts as rich prints them: in colour where stdout is a terminal, whose width they get.

    Text is not wrapped: lines to run can be copied.
    """
    to_terminal = sys.stdout.isatty()
    written = StringIO()
    console = Console(file=written, force_terminal=to_terminal, width=Console().width if to_terminal else _WIDTH)
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip().splitlines())


def _verdict(findings: Sequence[Finding]) -> list[str]:
    works = not any(found.is_bad for found in findings)
    todo = [f"    {found.what}: {found.todo}" for found in findings if found.todo and (works or found.is_bad)]
    if not works:
        return ["Training with overlap would not work here. To do:", *todo]
    return ["Training with overlap works here." + (" It may be better with:" if todo else ""), *todo]


def findings_json(findings: Sequence[Finding]) -> str:
    """`works`, and every finding with its fields."""
    works = not any(found.is_bad for found in findings)
    return json.dumps({"works": works, "findings": [asdict(found) for found in findings]}, indent=1)
