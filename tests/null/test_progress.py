"""Long work is told on stderr: a spinner on a terminal, a line elsewhere, nothing where short."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from hytrain_fx.progress import stage

LONG = """
import threading
from hytrain_fx import progress

seen = threading.Event()
made = progress._spinner
progress._spinner = lambda redirect: (made(redirect), seen.set())[0]
with progress.stage("reading the tea leaves", quiet=QUIET, after_s=0.0) as tell:
    tell("leaf", done=3, total=17)
    seen.wait(60)
    for _ in range(3):
        tell(done=4)
print("the end")
"""


def on_a_terminal(code: str) -> tuple[str, str]:
    """What a fresh interpreter prints on stdout, and on the terminal that is its stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not read:
            break
        shown += read
    os.close(ours)
    assert run.stdout is not None
    printed = run.stdout.read()
    run.stdout.close()
    assert run.wait() == 0, shown.decode()
    return printed, shown.decode()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_has_a_bar_that_goes(quiet: bool) -> None:
    """It names the work and how much is done; its line is erased and the cursor shown again."""
    printed, shown = on_a_terminal(LONG.replace("QUIET", str(quiet)))
    assert printed == "the end\n"
    assert "reading the tea leaves: leaf (4 of 17)" in shown
    assert "━" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_elsewhere_a_long_stage_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it tells; and stdout is left alone."""
    with stage("reading", after_s=0.0) as tell:
        told = ""
        while "\n" not in told:
            tell("leaf", done=1, total=2)
            told += capfd.readouterr().err
    assert told + capfd.readouterr().err == "hytrain_fx: reading ...\n"


def test_a_quiet_stage_tells_a_terminal_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Within another program nothing is printed into a file or a notebook, and no thread runs."""
    import threading

    before = threading.active_count()
    with stage("reading", quiet=True, after_s=0.0) as tell:
        tell("leaf")
        assert threading.active_count() == before
    assert capfd.readouterr() == ("", "")


def test_a_program_may_have_closed_its_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or have none: the work goes on."""
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with stage("reading", quiet=True, after_s=0.0) as tell:
            tell("leaf")


def test_a_short_stage_tells_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Its thread has ended with it."""
    with stage("reading", after_s=600.0) as tell:
        tell("leaf")
    assert capfd.readouterr() == ("", "")


def test_the_log_has_how_long_a_stage_took(caplog: pytest.LogCaptureFixture) -> None:
    """An error within it too, which goes on."""
    caplog.set_level("INFO", logger="hytrain_fx")
    with pytest.raises(ValueError, match="leaf"), stage("reading"):
        raise ValueError("leaf")
    assert [record.getMessage()[:9] for record in caplog.records] == ["reading: "]
