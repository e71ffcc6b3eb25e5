"""`python -m benchmarks COMMAND ...`: see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from benchmarks import beside, contention, figures, largest, ranks, rows, steps, sweep, table, zoo
from benchmarks import bytes as host_bytes
from benchmarks.case import PEER_MODES, CannotRun

COMMANDS: tuple[tuple[str, ModuleType, str], ...] = (
    ("steps", steps, "step time of one way of training, as one JSON line"),
    ("table", table, "cases side by side, each row in a process of its own"),
    ("rows", rows, "rows listed in a file, each in a process of its own"),
    ("sweep", sweep, "one model over more and more tokens, predicted beside measured"),
    ("figures", figures, "throughput, largest model and GPU idle time, from results"),
    ("zoo", zoo, "families of models side by side, and the limit of each"),
    ("ranks", ranks, "several ranks train one model: ours beside DDP and FSDP2"),
    ("largest", largest, "the largest model that trains, by trial"),
    ("bytes", host_bytes, "bytes of host memory of a step, bound and achieved"),
    ("contention", contention, "what host memory and the link give together"),
    ("beside", beside, "how much longer launching takes beside work on other cores"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, text in COMMANDS:
        command = commands.add_parser(name, help=text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        command.set_defaults(execute=module.run)
    parsed = parser.parse_args(arguments)
    try:
        row = parsed.execute(parsed)
    except CannotRun as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 1
    if parsed.command == "steps":
        print(json.dumps(row), flush=True)
        if parsed.mode in PEER_MODES:
            os._exit(0)  # their threads and process groups may keep the process from ending
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception it passes the code that ends a running row
    sys.exit(main())
