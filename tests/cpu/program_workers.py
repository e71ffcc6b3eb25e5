"""What each of several processes does with drawn programs.

It runs them one after the other on a pair of its own, and tells what came of each.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import hytrain_fx
from hytrain_fx.errors import HytrainError

from .program_models import Pair, quick_compiling
from .program_rank_calls import Gone
from .programs import Differs, Plant, Program, Seen, compare, first_line, outcome, planted, require_alike, started_again


@dataclass(frozen=True)
class Report:
    """What one rank tells of one program.

    differs   where ours has other bits than the plain loop, empty where it has not
    error     an error of ours that a plain loop has not
    closed    what closing the model after an error has raised
    gone      this rank has left, as the program says
    raised    what each call has raised, on which all ranks agree
    digest    of all that the ranks have alike at the end
    left      what is left over after close
    """

    differs: str = ""
    error: str = ""
    closed: str = ""
    gone: bool = False
    raised: tuple[str, ...] = ()
    digest: str = ""
    left: str = ""


def serve(connections: Sequence[Connection], folder: Path, plant: Plant | None, rank: int, size: int) -> None:
    """Run the programs that come. None closes the pair.

    plant   puts a defect into each pair
    """
    connection = connections[rank]
    with (folder / f"{rank}.stack").open("w") as stack, quick_compiling():
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        pair: Pair | None = None
        while True:
            program: Program | None = connection.recv()
            if pair is not None and (program is None or pair.setup != program.setup):
                left, pair = pair.close(), None
                connection.send(Report(left=left))
            if program is None:
                continue
            pair = planted(program.setup, plant) if pair is None else pair
            try:
                report = _run(pair, program)
                if report.error:
                    report = replace(report, closed=_closed(pair))
            except Gone:
                connection.send(Report(gone=True))
                if program.calls[-1][0] == "one rank stops":
                    time.sleep(600.0)
                os._exit(0)  # as a process whose error nobody catches
            except Exception as error:
                traceback.print_exc()
                report = Report(error=_told(error))
            connection.send(report)


def _run(pair: Pair, program: Program) -> Report:
    """Ours runs to its end first: ranks are to meet in its collectives alone."""
    with started_again(pair, program):
        found: list[Any] = []
        for number, call in enumerate(program.calls):
            found.append(outcome(pair.ours, call))
            if isinstance(found[-1], HytrainError):
                return Report(error=f"call {number}, {call}: {_told(found[-1])}")
        seen = Seen.of(pair.ours)
        raised = tuple(type(of).__name__ if isinstance(of, BaseException) else "" for of in found)
        differs = ""
        if program.setup.ranks == 2:  # with more, the bits depend on how a collective sums
            try:
                for number, (call, of) in enumerate(zip(program.calls, found, strict=True)):
                    require_alike(pair, call, of, f"call {number}, {call}")
                compare(pair, "at the end", seen)
            except Differs as error:
                differs = str(error)
    return Report(differs=differs, raised=raised, digest=_digest(seen))


def _closed(pair: Pair) -> str:
    """What comes of the model's end, which a loop has in its `finally`."""
    try:
        hytrain_fx.close(pair.ours.model)
    except Exception as error:
        return _told(error)
    return ""


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _digest(seen: Seen) -> str:
    states = seen.saved["state"]
    of_states = [torch.as_tensor(value) for number in sorted(states) for _, value in sorted(states[number].items())]
    digest = hashlib.sha256()
    for tensor in [*seen.weights, *(grad for grad in seen.gradients if grad is not None), *of_states]:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
