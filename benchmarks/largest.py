"""The largest model that trains, by batch: estimated from bytes by tier, and by trial.

    python -m benchmarks largest --out DIR --batches 1,4 --modes all_gpu,ours  writes trials.json

Models are of one family: N layers of N heads of 128 (N = 32 is Llama 7B). A trial runs as many
steps as the mode needs to settle (for hytrain_fx until its states are where the solved plan has
them). `figures` draws both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil
import torch

from benchmarks.case import TITLES, CannotRun, Case
from benchmarks.llama import VOCABULARY, family_shape
from benchmarks.markdown import table
from benchmarks.plots import Series
from benchmarks.results import Results
from benchmarks.runner import Launch, run_case
from benchmarks.table import add_run_arguments, launch_of
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import HOST_SHARE, footprint
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.shapes import ModelShape, read_shape

# fp32 weights, both moments and gradients, all on the host:
# https://deepspeed.readthedocs.io/en/latest/memory.html (ZeRO-2, offload).
ZERO_OFFLOAD_HOST_BYTES = 16
WIDEST = 128
TRIES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks largest`."""
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--sequence", "--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["all_gpu", "zero_offload", "ours"])
    parser.add_argument("--tries", type=int, default=TRIES, help="sizes that are tried for each mode and batch")
    parser.add_argument("--device", default=None, help="whose memory the first try is estimated from (default: this machine)")
    add_run_arguments(parser)
    parser.set_defaults(window=2)


def run(arguments: argparse.Namespace) -> None:
    """Try sizes near the estimates. Raises CannotRun for several GPUs.

    Every trial is kept in trials.json.
    """
    launch = launch_of(arguments)
    if launch.seats:
        raise CannotRun("found --gpus: sizes are tried one after the other, as host memory is part of what is tried; leave it out")
    spec, trials = spec_of(arguments.device), Results(arguments.out / "trials.json")
    for batch in arguments.batches:
        for mode in arguments.modes:
            start = Case(mode, f"w{max(estimated_width(mode, spec, batch * arguments.sequence), 1)}", batch, arguments.sequence)
            search(start, arguments.tries, lambda case: _trains(case, trials, launch, arguments.again))
    print(largest_table(estimates_and_trials(spec, arguments.batches, arguments.sequence, trials)))


def search(start: Case, tries: int, trains: Callable[[Case], bool]) -> Case | None:
    """The widest case that trains: up from `start` while they train, down while they do not."""
    width, best, direction = int(start.size[1:]), None, 0
    for _ in range(tries):
        case = replace(start, size=f"w{width}")
        if trains(case):
            best, now = case, 1
        else:
            now = -1
        if direction not in (0, now) or (width == 1 and now < 0):
            break
        direction = now
        width += now
    return best


def _trains(case: Case, trials: Results, launch: Launch, again: bool) -> bool:
    if again or trials.get(case) is None:
        row = run_case(case, launch)
        trials.put(case, row)
        print(f"{case.key}: {row.get('error') or 'trains'} ({row['wall_s']} s)")
    return trials.measured(case) is not None


def shape_of_width(width: int) -> ModelShape:
    """The cost model's shape of a model of the family."""
    keys = family_shape(width) | {"vocab_size": VOCABULARY, "num_key_value_heads": width}
    return read_shape({"model_type": "llama", "_name_or_path": f"w{width}", **keys})


def estimated_width(mode: str, spec: DeviceSpec, tokens: int) -> int:
    """The widest model whose bytes fit on the device and on the host, 0 where none does."""
    width = 0
    while width < WIDEST and fits(mode, spec, shape_of_width(width + 1), tokens):
        width += 1
    return width


def fits(mode: str, spec: DeviceSpec, shape: ModelShape, tokens: int) -> bool:
    """Whether a model is estimated to train.

    All states may be on the device, all on the host, or split by whole layers. Where states are
    split, those on the host are all updated by the CPU, or all streamed.
    """
    units = len(shape.units)
    if mode == "all_gpu":
        return footprint(shape, tokens, units).fits(spec)
    if mode == "zero_offload":
        on_host = ZERO_OFFLOAD_HOST_BYTES * shape.params <= HOST_SHARE * spec.host_memory_bytes
        return on_host and replace(footprint(shape, tokens, 0), host_states_bytes=0, host_slots_bytes=0).fits(spec)
    by_cpu = any(footprint(shape, tokens, k).fits(spec) for k in range(units + 1))
    return by_cpu or any(footprint(shape, tokens, k, streamed_params=sum(unit.params for unit in shape.units[k:])).fits(spec)
                         for k in range(units))


def spec_of(name: str | None) -> DeviceSpec:
    """A known device, or this machine's memory with the rates of a known one. Raises ConfigError.

    Estimates of memory use no rates.
    """
    spec = find_device(name or "h200")
    if name is not None or not torch.cuda.is_available():
        return spec
    return replace(spec, name=torch.cuda.get_device_name(), memory_bytes=torch.cuda.get_device_properties(0).total_memory,
                   host_memory_bytes=psutil.virtual_memory().total)


def estimates_and_trials(spec: DeviceSpec, batches: Sequence[int], sequence: int, trials: Results) -> list[Series]:
    """G parameters of the largest model by batch, for each mode.

    An estimate, and what was found by trial where there is any.
    """
    found = []
    for mode in ("all_gpu", "zero_offload", "ours"):
        widths = {batch: estimated_width(mode, spec, batch * sequence) for batch in batches}
        estimate = {float(batch): shape_of_width(width).params / 1e9 for batch, width in widths.items() if width}
        found.append(Series(f"{TITLES[mode]}, estimated for {spec.name}", estimate, "--"))
        if tried := _largest_tried(mode, sequence, trials):
            found.append(Series(f"{TITLES[mode]}, by trial", tried, "o"))
    return found


def _largest_tried(mode: str, sequence: int, trials: Results) -> dict[float, float]:
    largest: dict[float, float] = {}
    for case, row in trials.all_measured():
        if case.mode == mode and case.sequence == sequence:
            largest[float(case.batch)] = max(largest.get(float(case.batch), 0.0), row["params"] / 1e9)
    return largest


def largest_table(series: Sequence[Series]) -> str:
    """The same as Markdown: a row for each batch."""
    batches = sorted({x for line in series for x in line.points})
    lines = [[f"{batch:g}", *(_cell(line.points, batch) for line in series)] for batch in batches]
    return table(["batch", *(line.name for line in series)], lines)


def _cell(points: Mapping[float, float], batch: float) -> str:
    return f"{points[batch]:.2f}" if batch in points else "-"
