"""`python -m hytrain_fx`: reports without a GPU, saved plans, graphs of a script, the native engine.

    report     what a model would cost on a machine, for each way of placing the updates (nothing is run)
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
    report = commands.add_parser("report", help="predict a model on a machine")
    report.add_argument("--model", required=True, help="config.json, its folder, or a registered shape (llama-7b, ...)")
    report.add_argument("--device", required=True, help="a known name (h200, rtx4090, cpu-laptop, ...) or a JSON file")
    report.add_argument("--tokens", required=True, type=int, help="tokens in a micro-batch")
    report.add_argument("--sequence", type=int, help="tokens in a sequence (default: the model's context, at most --tokens)")
    report.add_argument("--recompute", action="store_true", help="activations are recomputed in the backward")
    report.add_argument("--budget-gb", type=float, help="device memory for optimizer states in 10^9 bytes (default: what is left)")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all figures as JSON")
    form.add_argument("--markdown", action="store_true", help="Markdown (the default)")
    report.set_defaults(run=_report)
    explain = commands.add_parser("explain", help="print a saved plan")
    explain.add_argument("--plan", required=True, type=Path, help="a file that holds the text of Plan.to_json()")
    explain.add_argument("--json", action="store_true", help="the plan as JSON, checked")
    explain.set_defaults(run=_explain)
    add_inspect(commands)
    build = commands.add_parser("build", help="compile the native engine")
    build.add_argument("--json", action="store_true", help="the path as JSON")
    build.set_defaults(run=_build)
    return parser


def _report(args: argparse.Namespace) -> str:
    from hytrain_fx.cost_model.report import report

    budget_bytes = None if args.budget_gb is None else int(args.budget_gb * 1e9)
    made = report(args.model, args.device, args.tokens, sequence=args.sequence, recompute=args.recompute, budget_bytes=budget_bytes)
    return made.to_json() if args.json else made.to_markdown()


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
