"""`report`, `plan`, `pipeline`, `profile` and `doctor`: their arguments, and who answers them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hytrain_fx.config import Moments, Weights
from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.named_files import require_writable
from hytrain_fx.ir.plan import Plan
from hytrain_fx.progress import stage

if TYPE_CHECKING:
    from hytrain_fx.forecast.device import DeviceSpec

_MOST_GB = 1e9
# Options, the figure of a device that each gives, and what it is the rate of.
_RATES = {
    "--gpu-link-gb-per-s": ("gpu_link_bytes_per_s", "between the GPUs of a machine, a GPU, each way"),
    "--network-gb-per-s": ("network_bytes_per_s", "between machines, a GPU, each way"),
    "--host-memory-gb-per-s": ("host_memory_gb_per_s", "the memory of one host, all its ranks together"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command prints, and its exit status."""

    text: str
    status: int = 0


def add_report(commands: Any) -> None:
    """The command `report`."""
    report = commands.add_parser("report", help="predict a model on a machine")
    _add_what(report)
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all figures as JSON")
    form.add_argument("--markdown", action="store_true", help="Markdown (the default)")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures to hover and zoom; it needs no other file")
    report.add_argument("--out", type=Path, help="write to this file, and print its name")
    report.set_defaults(run=_report)


def add_plan(commands: Any, run: Callable[[argparse.Namespace], str]) -> None:
    """The command `plan`; `run` shows what `plan_of` gives."""
    plan = commands.add_parser("plan", help="the plan for a model on a machine, without running it")
    _add_what(plan)
    plan.add_argument("--json", action="store_true", help="for compile(..., plan=Plan.from_json(text)), of one GPU")
    plan.set_defaults(run=run)


def add_pipeline(commands: Any) -> None:
    """The command `pipeline`."""
    pipeline = commands.add_parser("pipeline", help="predict a model as the stages of a 1F1B pipeline, each on a GPU")
    _add_model(pipeline)
    pipeline.add_argument("--stages", required=True, type=int, metavar="N", help="GPUs, a stage on each")
    pipeline.add_argument("--micro-batches", required=True, type=int, metavar="M", help="of a step; --tokens are those of one")
    pipeline.set_defaults(run=_pipeline)


def _add_what(command: argparse.ArgumentParser) -> None:
    """The arguments that say which model, on which machine, and how many of them."""
    _add_model(command)
    command.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of one machine, a rank on each (default: 1)")
    command.add_argument("--nodes", type=int, default=1, metavar="M", help="such machines (default: 1)")
    command.add_argument("--skew", type=float, default=1.0, metavar="X", help="one rank takes X times as long as the others (default: 1)")
    for option, (_, of) in _RATES.items():
        command.add_argument(option, type=float, metavar="GB", help=f"{of}, 10^9 bytes a second, instead of the device's own figure")
    command.add_argument("--weights", choices=get_args(Weights), default="resident", help="where 16-bit weights rest whose updates the CPU "
                         "does, as in compile(..., weights=...): streamed ones on the host, sharded ones in shards of several GPUs or "
                         "their host; auto: streamed where they do not fit on the device (default: resident)")
    command.add_argument("--budget-gb", type=float, help="device memory for optimizer states in 10^9 bytes (default: what is left)")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="config.json of a model of transformers, its folder, a shape's name (llama-7b), or "
                         "package.module:factory, a function that returns a model, or a model and its example inputs, on the meta device")
    command.add_argument("--device", required=True, help="a known name (h200, rtx4090, cpu-laptop, ...) or a TOML or JSON file")
    command.add_argument("--host", help="another machine whose host to take: its CPU's update rate, memory and bandwidth")
    command.add_argument("--tokens", required=True, type=int, help="tokens in a micro-batch (samples of images or recordings)")
    command.add_argument("--sequence", type=int, help="tokens in a sequence (default: the model's context, at most --tokens)")
    command.add_argument("--recompute", action="store_true", help="activations are recomputed in the backward")
    command.add_argument("--autocast", action="store_true", help="fp32 weights under autocast to bf16, on the device as bf16 copies")
    command.add_argument("--moments", choices=get_args(Moments), default="fp32", help="in what AdamW's two states rest, as in "
                         "compile(..., moments=...): in bf16 they take half the memory (default: fp32)")


def add_doctor(commands: Any) -> None:
    """The command `doctor`."""
    doctor = commands.add_parser("doctor", help="whether training with overlap works here, in a few seconds; exit status 1 if not")
    doctor.add_argument("--json", action="store_true", help="what was found, as JSON")
    doctor.set_defaults(run=_doctor)


def add_profile(commands: Any) -> None:
    """The command `profile`."""
    profile = commands.add_parser("profile", help="measure this machine's rates into a JSON file for `report --device`")
    profile.add_argument("--name", help="what to call the machine (default: its device's name)")
    profile.add_argument("--seconds", type=float, default=1.0, help="length of each measurement")
    profile.add_argument("--megabytes", type=int, default=512, help="host memory that updates and copies work on")
    profile.add_argument("--workers", type=int, help="CPU threads that update (default: as a training run takes)")
    profile.add_argument("--out", type=Path, help="write to this file, and print its name")
    profile.add_argument("--json", action="store_true", help="JSON (the only form)")
    profile.set_defaults(run=_profile)


def _report(args: argparse.Namespace) -> str:
    if args.html is not None and args.out is not None:
        raise ConfigError(f"found --html {args.html} and --out {args.out}, expected one: --html names its file itself")
    require_writable(args.out or args.html)
    from hytrain_fx.forecast.plots import plotly
    from hytrain_fx.forecast.report import report

    if args.html:
        plotly()  # whether it is there is said before the work, not after it

    device, options = _asked(args)
    with stage("predicting", quiet=True) as tell:  # what is wrong is told in one line
        made = report(args.model, device, args.tokens, **options, tell=tell)
    if args.json:
        return _written(made.to_json(), args.out)
    if args.html:
        from hytrain_fx.forecast.page import page

        return _written(page(made), args.html)
    from hytrain_fx.forecast.page import markdown

    return _written(markdown(made), args.out)


def _pipeline(args: argparse.Namespace) -> str:
    from hytrain_fx.explain.timeline.text import timelines_text
    from hytrain_fx.forecast.page import section
    from hytrain_fx.forecast.report import case_of
    from hytrain_fx.forecast.stages import pipeline_forecast

    case = case_of(args.model, _device(args), args.tokens, sequence=args.sequence, recompute=args.recompute, autocast=args.autocast,
                   moments=args.moments)
    found = pipeline_forecast(case.profile, args.stages, args.micro_batches)
    return f"{section(found.table())}\n\n```\n{timelines_text([found.timeline], 120)}\n```"


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that `report` would choose; on stderr, whether it does not fit.

    Raises ConfigError and PlanError as `report` does.
    """
    from hytrain_fx.forecast.report import case_of
    from hytrain_fx.forecast.systems import OUR_SYSTEM
    from hytrain_fx.forecast.verdict import over_line

    device, options = _asked(args)
    with stage("predicting", quiet=True):
        case = case_of(args.model, device, args.tokens, **options)
        plan = case.plan_of(OUR_SYSTEM)
        row = case.row_of(OUR_SYSTEM, plan)
    if not row.fits:
        print(over_line(row.memory, case.device), file=sys.stderr)
    return plan


def _asked(args: argparse.Namespace) -> tuple[DeviceSpec, dict[str, Any]]:
    """The device, and what else `report` and `case_of` are to be given after the tokens."""
    from hytrain_fx.forecast.ranks import Ranks

    device = _device(args)
    ranks = Ranks(args.gpus, args.nodes, args.skew)
    device = _with_rates(device.in_machine_of(ranks), args)
    budget_bytes = None if args.budget_gb is None else _bytes(args.budget_gb)
    return device, {"sequence": args.sequence, "recompute": args.recompute, "budget_bytes": budget_bytes, "autocast": args.autocast,
                    "ranks": ranks, "moments": args.moments, "weights": args.weights}


def _device(args: argparse.Namespace) -> DeviceSpec:
    """The device, on the host that was asked for."""
    from hytrain_fx.forecast.named_devices import find_device

    device = find_device(args.device)
    return device if args.host is None else device.on_host_of(find_device(args.host))


def _with_rates(device: DeviceSpec, args: argparse.Namespace) -> DeviceSpec:
    """The device with the rates that were given."""
    for option, (figure, _) in _RATES.items():
        gb_per_s = getattr(args, option.removeprefix("--").replace("-", "_"))
        if gb_per_s is None:
            continue
        if not 0 < gb_per_s < _MOST_GB:
            raise ConfigError(f"found {option} {gb_per_s:g}, expected more than 0 and less than {_MOST_GB:g}")
        if figure == "gpu_link_bytes_per_s" and args.gpus == 1:
            raise ConfigError(f"found {option} {gb_per_s:g} with one GPU in a machine, expected several: set --gpus")
        if figure == "network_bytes_per_s" and args.nodes == 1:
            raise ConfigError(f"found {option} {gb_per_s:g} with one machine, expected several: set --nodes")
        scale = 1.0 if figure.endswith("gb_per_s") else 1e9
        device = replace(device, sources={**device.sources, figure: f"given: {option}"}, **{figure: scale * gb_per_s})
    return device


def _bytes(gb: float) -> int:
    if not 0 <= gb < _MOST_GB:
        raise ConfigError(f"found a budget of {gb:g} GB for states on the device, expected 0 to {_MOST_GB:g}")
    return int(gb * 1e9)


def _profile(args: argparse.Namespace) -> str:
    from hytrain_fx.forecast.machine import measure_machine

    require_writable(args.out)
    with stage("measuring this machine") as tell:
        measured = measure_machine(args.name, args.seconds, args.megabytes << 20, args.workers, tell)
    return _written(measured.to_json(), args.out)


def _doctor(args: argparse.Namespace) -> Answer:
    from hytrain_fx.forecast.doctor import examine
    from hytrain_fx.forecast.doctor_table import findings_json, findings_text

    with stage("looking at this machine") as tell:
        findings = examine(tell)
    text = findings_json(findings) if args.json else findings_text(findings)
    return Answer(text, status=int(any(found.is_bad for found in findings)))


def _written(text: str, out: Path | None) -> str:
    if out is None:
        return text
    out.write_text(text, encoding="utf-8")
    return str(out)
