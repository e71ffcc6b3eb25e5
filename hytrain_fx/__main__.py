"""`python -m hytrain_fx`: reports without a GPU, saved plans, graphs of a script, the native engine.

    report     what a model would cost on a machine, for each way of placing the updates (nothing is run)
    profile    this machine's rates, measured, as a file for `report --device`
    explain    a saved plan as text
    inspect    the graphs of a script or a dump folder, and what each pass inserted
    build      compile the native engine now, instead of at the first use
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hytrain_fx.errors import HytrainError
from hytrain_fx.inspect_command import add_inspect, split_arguments
from hytrain_fx.offline.command import add_profile, add_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 when it failed with an error of this library (told on stderr)."""
    own, behind = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(own, argparse.Namespace(script_arguments=behind))
    if behind and args.command != "inspect":
        parser.error(f"unrecognized arguments: -- {' '.join(behind)}")
    try:
        print(args.run(args))
    except (HytrainError, OSError) as error:
        print(f"python -m hytrain_fx {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hytrain_fx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_report(commands)
    add_profile(commands)
    explain = commands.add_parser("explain", help="print a saved plan")
    explain.add_argument("--plan", required=True, type=Path, help="a file that holds the text of Plan.to_json()")
    explain.add_argument("--json", action="store_true", help="the plan as JSON, checked")
    explain.set_defaults(run=_explain)
    add_inspect(commands)
    build = commands.add_parser("build", help="compile the native engine")
    build.add_argument("--json", action="store_true", help="the path as JSON")
    build.set_defaults(run=_build)
    return parser


def _explain(args: argparse.Namespace) -> str:
    from hytrain_fx.explain.plan_text import plan_text
    from hytrain_fx.ir.plan import Plan

    plan = Plan.from_json(args.plan.read_text())
    return plan.to_json() if args.json else plan_text(plan)


def _build(args: argparse.Namespace) -> str:
    from hytrain_fx.runtime import build
    from hytrain_fx.runtime.native_engine import SOURCES

    path = str(build.library(SOURCES))
    return json.dumps({"library": path}) if args.json else path


if __name__ == "__main__":
    sys.exit(main())
