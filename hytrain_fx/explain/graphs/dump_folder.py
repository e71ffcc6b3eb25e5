"""Lists a dump folder (`Config.dump`): graphs as captured, passes as run, what each inserted.

File names come from `passes.graph_dump`: `01.backward.02.insert_steps.after.txt`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.lines import count_inserted, diff_text, inserted_lines

_NAME = re.compile(r"(?P<graph>\d+\.(?:forward|backward|inference))\.(?P<number>\d+)\.(?P<pass>\w+)\.after\.txt")


@dataclass(frozen=True, slots=True)
class DumpedPass:
    """One pass over one graph.

    How many nodes of each operator it added, and the file with the text after it.
    """

    graph: str
    number: int
    name: str
    added: dict[str, int]
    after: Path


def read_dump(folder: Path) -> tuple[DumpedPass, ...]:
    """The passes of a dump folder in order. Raises ConfigError where the folder holds none."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*.after.txt"))
    found = sorted((m["graph"], int(m["number"]), m["pass"], path) for m, path in named if m)
    if not found:
        raise ConfigError(f"found no graph texts in {str(folder)!r}; expected the folder given to compile(..., dump=...)")
    return tuple(DumpedPass(graph, number, name, _added(path), path) for graph, number, name, path in found)


def dump_text(passes: tuple[DumpedPass, ...]) -> str:
    """One line for each graph and pass."""
    lines: list[str] = []
    for dumped in passes:
        if not lines or dumped.number == 0:
            lines.append(dumped.graph)
        added = ", ".join(f"{count} {op}" for op, count in dumped.added.items())
        lines.append(f"  {dumped.number:02} {dumped.name}" + (f": {added}" if added else ""))
    return "\n".join(lines)


def dump_diff(passes: tuple[DumpedPass, ...]) -> str:
    """The inserted nodes of each graph after its last pass, in their context.

    Parameters are known by row number only.
    """
    last = {dumped.graph: dumped for dumped in passes}
    return "\n\n".join(f"{graph}\n{_diff(dumped.after.read_text())}" for graph, dumped in last.items())


def _diff(text: str) -> str:
    return diff_text(text, {node.line: f"{len(node.rows)} parameters" for node in inserted_lines(text)})


def _added(after: Path) -> dict[str, int]:
    before = after.with_name(after.name.replace(".after.txt", ".before.txt"))
    return dict(_counted(after) - _counted(before))


def _counted(path: Path) -> Counter[str]:
    return count_inserted(inserted_lines(path.read_text())) if path.is_file() else Counter()
