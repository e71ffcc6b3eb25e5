"""README.md and every page of docs/ do what they show.

Their code runs in the order of the page, and their commands are accepted. Of a page, in its order
and in one empty folder, run

    ```python blocks        what a reader sees
    <!-- python ... -->     what a page takes as given (a tiny model, a file), and what must
                            hold after a block
    python -m hytrain_fx    in an indented or fenced block: run; `bench`, and a page's
                            `python -m benchmarks` and `python -m docs.draw_figures`, are read by
                            their own parsers, not run
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import __main__ as benchmarks_line
from docs import draw_figures
from hytrain_fx import errors
from hytrain_fx.__main__ import main
from hytrain_fx.forecast.bench import command as bench_line

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A visible or a hidden block of Python, or a line of a code block that starts with a command.
PIECE = re.compile(
    r"^```python\n(?P<shown>.*?)^```|^<!-- python\n(?P<hidden>.*?)^-->"
    r"|^(?:    )?(?:\$ )?python -m (?P<program>hytrain_fx|benchmarks|docs\.draw_figures) (?P<line>[^\n]*)",
    re.MULTILINE | re.DOTALL,
)
QUICKLY = {"profile": ("--seconds", "0.02", "--megabytes", "64")}  # what is added to a command, for the test's sake
# [words](page.md#anchor), [words](#anchor), and the pictures of <picture>
LINK = re.compile(r"""\]\((?P<target>[^)#:]*)(?P<anchor>#[^)]*)?\)|\b(?:src|srcset)="(?P<picture>[^":]+)""""")
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def pieces_of(page: Path) -> list[re.Match[str]]:
    """What is to be run, in order."""
    return list(PIECE.finditer(page.read_text()))


def python_of(piece: re.Match[str]) -> str | None:
    """The source of a block, None for a command."""
    return piece["shown"] if piece["shown"] is not None else piece["hidden"]


def script_of(page: str) -> str:
    """The first visible block of a page of docs/."""
    return next(piece["shown"] for piece in pieces_of(ROOT / "docs" / f"{page}.md") if piece["shown"])


PROGRAMS = {"hytrain_fx": main, "benchmarks": benchmarks_line.main, "docs.draw_figures": draw_figures.main}
PAGES_THAT_RUN = [page for page in PAGES if pieces_of(page)]


@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.stem)
def test_the_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block after block and command after command.

    A hidden block may look at `printed` (all output so far) and `shown` (the last visible block),
    and take another page's first block with `script_of("quick_start")`.
    """
    monkeypatch.chdir(tmp_path)
    for _, module, _ in benchmarks_line.COMMANDS:
        monkeypatch.setattr(module, "run", lambda arguments: {})
    monkeypatch.setattr(bench_line, "_bench", lambda arguments: "")
    monkeypatch.setattr(draw_figures, "record", lambda *_: None)
    monkeypatch.setattr(draw_figures, "FIGURES", dict.fromkeys(draw_figures.FIGURES, lambda *_: None))
    torch._dynamo.reset()
    monkeypatch.setattr("sys.argv", [page.name])
    module = ModuleType(f"snippets_of_{page.stem}")  # a class of a snippet is looked up in its module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    names |= {"printed": "", "shown": "", "script_of": script_of}
    for piece in pieces_of(page):
        source = python_of(piece)
        if source is not None:
            line = page.read_text().count("\n", 0, piece.start()) + 1
            exec(compile("\n" * line + source, str(page), "exec"), names)
            names["shown"] = piece["shown"] or names["shown"]
        else:
            run = PROGRAMS[piece["program"]]
            arguments = shlex.split(piece["line"], comments=True)
            assert run([*arguments, *QUICKLY.get(arguments[0], ())]) == 0, piece[0]
        names["printed"] += capsys.readouterr().out


def test_every_python_block_is_found() -> None:
    """No page has a fence of Python that the pattern overlooks, indented or in another spelling."""
    fences = {page.name: len(re.findall(r"^\s*[`~]{3,}[ \t]*\{?\.?py", page.read_text(), re.MULTILINE)) for page in PAGES}
    assert fences == {page.name: sum(piece["shown"] is not None for piece in pieces_of(page)) for page in PAGES}
    assert fences["README.md"] == 1


def test_the_links_of_all_pages_lead_somewhere() -> None:
    """Every relative link and picture is a file or folder of the repository.

    Its anchor is a heading of that page.
    """
    wrong = []
    for page in LINKED:
        for link in LINK.finditer(page.read_text()):
            target, anchor = link["target"] or link["picture"], link["anchor"]
            found = page.parent / target if target else page
            if not found.exists() or (anchor and anchor[1:] not in anchors_of(found)):
                wrong.append(f"{page.name}: {link[0]}")
    assert wrong == []


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made from the words."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Every message in a table headed `message` is in one string of the library.

    A … stands for anything. Messages that are torch's or Python's own are left out.
    """
    texts = list(strings_of_the_library())
    wrong = []
    for row in message_rows():
        messages = re.findall(r"`([^`]+)`", row.split("|")[1])
        assert messages, row
        if not re.search("(torch|Python)'s own", row) and not all(any(holds(text, message) for text in texts) for message in messages):
            wrong.append(row)
    assert wrong == []


def holds(text: str, message: str) -> bool:
    """Whether a text has the parts of a message between its …, one after the other.

    A regular expression takes ten times as long.
    """
    at = 0
    for part in message.split("…"):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def message_rows() -> Iterator[str]:
    """The rows of all tables headed `message`."""
    for table in re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", TROUBLESHOOTING.read_text(), re.MULTILINE):
        yield from table.splitlines()


def test_every_kind_of_error_and_warning_is_on_the_page() -> None:
    """Troubleshooting names each class of `hytrain_fx.errors`."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert "HytrainWarning" in kinds
    assert {name for name in kinds if f"`{name}`" not in TROUBLESHOOTING.read_text()} == set()


# Where messages for users come from; others are about values that they do not make.
ROOMS = ("api.py", "forecast/bench", "capture", "gradients", "integrations", "session", "torch_private/names.py", "weights")
KINDS = ("ConfigError", "HostMemoryError", "HytrainWarning", "StatesError", "UnsupportedError")


def test_every_refusal_and_warning_is_on_the_page() -> None:
    """Each that these rooms raise or warn of has a message in a table, or its kind has.

    `GradientConsumedError` and the like are one message each.
    """
    messages = [message for row in message_rows() for message in re.findall(r"`([^`]+)`", row.split("|")[1])]
    told = [(path, texts) for path in (ROOT / "hytrain_fx").rglob("*.py") for texts in refusals_in(path)
            if path.relative_to(ROOT / "hytrain_fx").as_posix().startswith(ROOMS)]
    assert len(told) > 40
    assert [(path.name, texts) for path, texts in told if not any(holds(text, message) for message in messages for text in texts)] == []


def refusals_in(path: Path) -> Iterator[list[str]]:
    """The strings of each call that makes an error or a warning of `KINDS`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            made = ast.unparse(node.func)
            if made in KINDS or (made == "warnings.warn" and "HytrainWarning" in map(ast.unparse, node.args)):
                yield [text for part in node.args for inner in ast.walk(part) if (text := text_of(inner)) is not None]


def strings_of_the_library() -> Iterator[str]:
    """Every string of the library's Python, and every line of the engine's C++.

    An expression inside a string is a space.
    """
    for path in (ROOT / "hytrain_fx").rglob("*.py"):
        yield from (text for node in ast.walk(ast.parse(path.read_text())) if (text := text_of(node)) is not None)
    for path in (ROOT / "hytrain_fx" / "runtime" / "csrc").iterdir():
        yield from path.read_text().splitlines()


def text_of(node: ast.AST) -> str | None:
    """The string that a node is; an expression inside it is a space."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
