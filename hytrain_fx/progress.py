"""Tells on stderr what takes long: a spinner or bar where that is a terminal, else a line a stage.

    with stage("measuring this machine") as tell:
        tell("copies")                          # what is done now
        tell(done=3, total=17)                  # a bar

Nothing is shown in the first two seconds, and a spinner goes when the block ends. The logger
`hytrain_fx` is told how long each stage took; it is silent until a program sets up logging.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

LONG_S = 2.0
_log = logging.getLogger("hytrain_fx")


class Tell(Protocol):
    """What the block of a stage calls.

    With what is done now, or with how many of its parts are done.
    """

    def __call__(self, what: str = "", *, done: int | None = None, total: int | None = None) -> None: ...


def untold(what: str = "", *, done: int | None = None, total: int | None = None) -> None:
    """A `Tell` where nobody wants to know."""


@contextlib.contextmanager
def stage(what: str, *, quiet: bool = False, after_s: float = LONG_S) -> Iterator[Tell]:
    """Around work that may take long.

    quiet      within other programs: elsewhere than on a terminal nothing is printed, and the
               program's own prints are not touched
    after_s    seconds before anything is shown
    """
    shown = None if quiet and not _on_terminal() else _Shown(what, quiet, after_s)
    began_s = time.perf_counter()
    try:
        yield untold if shown is None else shown.tell
    finally:
        if shown is not None:
            shown.end()
        if not quiet:  # of compile() the log has the start-up by phase
            _log.info("%s: %.1f s", what, time.perf_counter() - began_s)


def _on_terminal() -> bool:
    """Whether stderr is one; a program may have closed it, or have none."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False


class _Shown:
    """A stage that shows itself from a thread of its own, once it has taken `after_s` seconds."""

    def __init__(self, what: str, quiet: bool, after_s: float) -> None:
        self._what, self._quiet, self._after_s = what, quiet, after_s
        self._detail, self._done = "", 0
        self._total: int | None = None
        self._progress: Progress | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._show_later, name="hytrain_fx progress", daemon=True)
        self._thread.start()

    def tell(self, what: str = "", *, done: int | None = None, total: int | None = None) -> None:
        """See `Tell`."""
        with self._lock:
            self._detail = what or self._detail
            self._done = self._done if done is None else done
            self._total = self._total if total is None else total
            if self._progress is not None:
                self._progress.update(self._progress.task_ids[0], description=self._text(), completed=self._done, total=self._total)

    def end(self) -> None:
        """Take a spinner from the screen."""
        self._ended.set()
        self._thread.join()
        if self._progress is not None:
            self._progress.stop()

    def _text(self) -> str:
        detail = f": {self._detail}" if self._detail else ""
        return f"{self._what}{detail}" + (f" ({self._done} of {self._total})" if self._total else "")

    def _show_later(self) -> None:
        if self._ended.wait(self._after_s):
            return
        with self._lock:
            if not _on_terminal():
                print(f"hytrain_fx: {self._what} ...", file=sys.stderr, flush=True)
                return
            self._progress = _spinner(redirect=not self._quiet)
            self._progress.add_task(self._text(), total=self._total, completed=self._done)
            self._progress.start()


def _spinner(redirect: bool) -> Progress:
    """On stderr; its line goes when it stops. With `redirect` what is printed stands above it."""
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress_bar import ProgressBar

    class Bar(ProgressColumn):
        """Where the number of parts is known."""

        def render(self, task: Task) -> RenderableType:
            return ProgressBar(total=task.total, completed=task.completed, width=20) if task.total else ""

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), Bar(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=redirect, redirect_stderr=redirect)
