"""A headless Chrome or Chromium that a test looks through, spoken to over two pipes.

`--remote-debugging-pipe` is the DevTools protocol as JSON, each message ended by a zero byte: it
reads descriptor 3 and writes descriptor 4. No driver and no package is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = ("--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
          "--window-size=1200,900")


def find_browser() -> str | None:
    """`$CHROME`, or the first of `NAMES` on PATH."""
    asked = os.environ.get("CHROME")
    return shutil.which(asked) if asked else next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page, open in the browser."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._unread = b""
        self._asked = 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def open(self, file: Path) -> None:
        """Return when the page and all in it is loaded."""
        self.call("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is, a promise's result too. An error in it is raised."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The expression's value once it counts as true; an error where it never does."""
        return self.value("new Promise((done, fail) => { const end = setTimeout(() => fail('never true'), 60000); const look = () => "
                          f"{{ const is = {script}; if (is) {{ clearTimeout(end); done(is) }} else setTimeout(look, 20) }}; look() }})")

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        """`kind`: mouseMoved, mousePressed or mouseReleased."""
        held = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **(held if pressed or kind != "mouseMoved" else {}))

    def call(self, method: str, **parameters: Any) -> Any:
        """A method of the protocol; what comes before its answer is kept in `events`."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": parameters, **self._session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._asked:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._reads, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browsing(browser: str, profile: Path) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block; `profile` is a folder for it."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [f"fcntl.fcntl({descriptor}, fcntl.F_DUPFD, 100)" for descriptor in (theirs_in, theirs_out)]  # clear of 3 and 4
    numbered = f"import fcntl, os, sys; i, o = {', '.join(high)}; os.dup2(i, 3); os.dup2(o, 4); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", numbered, browser, *_FLAGS, f"--user-data-dir={profile}"]
    try:
        with subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            os.close(theirs_in)
            os.close(theirs_out)
            try:
                yield Page(ours_in, ours_out)
            finally:
                process.kill()
    finally:
        os.close(ours_in)
        os.close(ours_out)
