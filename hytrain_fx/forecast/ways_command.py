"""`ways`: a large model on several GPUs: weights resident, sharded, in stages, streamed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from hytrain_fx.errors import ConfigError


def add_ways(commands: Any) -> None:
    """The command `ways`."""
    ways = commands.add_parser("ways", help="ways to train a large model on several GPUs of one host, side by side (nothing is run)")
    ways.add_argument("--model", required=True, nargs="+", help="each as of `report`: a config.json, a folder, a shape's name or "
                      "package.module:factory")
    ways.add_argument("--machine", required=True, nargs="+", metavar="NxDEVICE", help="GPUs of one host, each as of `report`: 8xh100, "
                      "4xmachine.toml")
    ways.add_argument("--tokens", required=True, type=int, help="tokens of each GPU in a step")
    ways.add_argument("--sequence", type=int, help="tokens in a sequence, a micro-batch of the pipeline (default: the model's context)")
    ways.add_argument("--recompute", action="store_true", help="activations are recomputed in the backward")
    ways.add_argument("--json", action="store_true", help="all figures as JSON")
    ways.set_defaults(run=_ways)


def _ways(args: argparse.Namespace) -> str:
    from hytrain_fx.forecast.models import find_model
    from hytrain_fx.forecast.page import section
    from hytrain_fx.forecast.ways import ways_of, ways_table

    machines = [machine_of(text) for text in args.machine]
    found = [ways_of(shape, device, gpus, args.tokens, sequence=args.sequence, recompute=args.recompute)
             for shape in map(find_model, args.model) for gpus, device in machines]
    return json.dumps([asdict(of) for of in found], indent=1) if args.json else section(ways_table(found))


def machine_of(text: str) -> tuple[int, str]:
    """How many GPUs, and which: "8xh100". Raises ConfigError for anything else."""
    count, _, device = text.partition("x")
    if not (count.isdecimal() and device):
        raise ConfigError(f"found --machine {text!r}, expected a number of GPUs, x and a device: 8xh100, 4xmachine.toml")
    return int(count), device
