"""`share`: where it pays that the CPU trains a part of each batch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def add_share(commands: Any) -> None:
    """The command `share`."""
    share = commands.add_parser("share", help="where the CPU's share of a batch pays, by classes of GPU and CPU (nothing is run)")
    share.add_argument("--model", required=True, help="as of `report`: a config.json, a folder, a shape's name or package.module:factory")
    share.add_argument("--tokens", required=True, type=int, help="tokens in a batch")
    share.add_argument("--sequence", type=int, help="tokens in a sequence, the grain of a share (default: the model's context)")
    share.add_argument("--recompute", action="store_true", help="activations are recomputed in the backward")
    share.add_argument("--clips", action="store_true", help="the loop takes norms of gradients: sums on the host come to the device")
    share.add_argument("--json", action="store_true", help="all figures as JSON")
    share.set_defaults(run=_share)


def _share(args: argparse.Namespace) -> str:
    from hytrain_fx.forecast.cpu_share import shares
    from hytrain_fx.forecast.page import section

    found = shares(args.model, args.tokens, sequence=args.sequence, recompute=args.recompute, clips=args.clips)
    return json.dumps(asdict(found), indent=1) if args.json else section(found.table())
