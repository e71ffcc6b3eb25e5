"""A row in a process of its own: it leaves no memory behind, and its failure is a line of text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

CANNOT_RUN = "cannot run: "
NO_MEMORY = "out of memory: "
_KILLED = "killed (by the system"
FROM_OUTSIDE = -1000
"""Status of a command that was killed while the system ended no process for want of memory."""
_LOOK_S = 0.25  # between two looks at a process that may be ended early: 64 GB fill in some ten seconds


def lacked_memory(why: str) -> bool:
    """Whether a row ended for want of memory, and not for another reason."""
    return why.startswith((NO_MEMORY, _KILLED))


def run_to_end(
    command: Sequence[str], output: int, limit_s: float, env: Mapping[str, str], pass_fds: Sequence[int] = (),
    may_go_on: Callable[[int], bool] | None = None,
) -> int | None:  # fmt: skip
    """The exit status of a command whose output goes to the descriptor `output`.

    None where the time was up. The processes it started end with it, those of other sessions too:
    torchrun's ranks. FROM_OUTSIDE where somebody else has killed it. `may_go_on` is asked four
    times a second, with the command's process id: where it says no, the command is killed.
    """
    kills = _kills_for_memory()
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True, pass_fds=pass_fds)
    try:
        with contextlib.suppress(OSError):  # where host memory is used up, the system should end the row and not this process
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        status = process.wait(timeout=limit_s) if may_go_on is None else _watched(process, limit_s, may_go_on)
        if status == -signal.SIGKILL and process.returncode is not None and kills is not None and _kills_for_memory() == kills:
            return FROM_OUTSIDE  # it is not ended yet where it may not go on
        return status
    except subprocess.TimeoutExpired:
        return None
    finally:
        started = _started_by(process.pid)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and all it started
            os.killpg(process.pid, signal.SIGKILL)
        for other in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
        process.wait()


def _watched(process: subprocess.Popen[bytes], limit_s: float, may_go_on: Callable[[int], bool]) -> int:
    """As `process.wait`, which raises TimeoutExpired; less than that where it may not go on."""
    end_s = time.monotonic() + limit_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            return process.wait(timeout=max(min(_LOOK_S, left_s), 0.0))
        except subprocess.TimeoutExpired:
            if left_s <= _LOOK_S:
                raise
        if not may_go_on(process.pid):
            return -signal.SIGKILL


def _kills_for_memory() -> int | None:
    """How many processes the system has ended so far for want of memory; None: unknown."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None


def _started_by(pid: int) -> list[psutil.Process]:
    """What a process has started, directly or not, and has not ended: nothing once it has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def row_in(printed: str) -> dict[str, Any] | None:
    """The last line that is a row; packages print more before and after it."""
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if "step_s" in found:
                return found
    return None


def why_none(status: int | None, printed: str, limit_s: float) -> str:
    """Why there is no row: the error's own line."""
    if status is None:
        return f"took longer than {limit_s:g} s"
    if status == -signal.SIGKILL:
        return f"{_KILLED}: it does so when host memory is used up)"
    if status == FROM_OUTSIDE:
        return "killed from outside, and not for want of memory: by a time limit around it, or by hand"
    lines = [re.sub(r"^\[rank\d+\]: ", "", line.strip()) for line in printed.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(CANNOT_RUN) or re.match(r"[\w.]*(Error|Exception|Failed|Unsupported)\b", line)]
    told = [line for line in told if not line.startswith("torch.distributed.elastic")]  # torchrun's, after the ranks' own
    last = (told or lines or ["nothing was printed"])[-1]
    return last.removeprefix(CANNOT_RUN)[:400] if status > 0 else f"ended by signal {-status}: {last[:400]}"
