"""Where the CPU's share of a batch pays: classes of GPU by classes of CPU.

Each GPU is put into a host of each class, and `cost_model.cpu_share` is asked how many sequences
the CPU should train: with states placed as `plan` does it, and with all on the GPU where they fit,
as what updates on the CPU does not train there. A host's figures are per core, up to what its
memory gives:

    training    FLOPS_PER_CORE of matrix products in bf16 with AMX
    updates     the H200's host: 5.9 G parameters a second by 16 cores
    memory      BANDWIDTHS, by sockets

Without a GPU both parts would run on the same cores, so nothing is to be shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, CpuShare, ShareTimes, answer, best_share
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes
from hytrain_fx.forecast.device import LAUNCH_US_PER_UNIT, DeviceSpec, analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case
from hytrain_fx.ir.figures import Table, time_text
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.states import UPDATE_BYTES_PER_PARAM

FLOPS_PER_CORE: Final = 0.94e12
"""Estimated: 23% of the 2048 FLOP a cycle at 2 GHz that a core with AMX has in bf16."""
UPDATES_PER_CORE: Final = 5.9e9 / 16
CORES: Final = (2, 16, 64, 128)
BANDWIDTHS: Final = {2: 30.0, 16: 215.0, 64: 215.0, 128: 430.0}
"""By cores, 10^9 bytes a second: estimated for 2, measured on the H200's host for a socket, twice
that for two."""
GPUS: Final = ("h200", "rtx4090")
_SUM_BYTES: Final = 3 * HALF_BYTES  # of host memory a parameter: two gradients read, their sum written
_PASSES: Final = 3  # forward, and two products for each in the backward: each reads the weights or writes their gradients


@dataclass(frozen=True, slots=True)
class ShareCase:
    """One GPU in one host.

    on_device   share of the parameters whose states rest on the GPU beside the best share
    fits        whether both memories hold what the device's part takes of a whole batch
    share       what the CPU should train of a batch
    """

    gpu: str
    cores: int
    on_device: float
    fits: bool
    share: CpuShare


@dataclass(frozen=True, slots=True)
class ShareTable:
    """A model's batch on all of them."""

    model: str
    sequences: int
    cases: tuple[ShareCase, ...]

    def table(self) -> Table:
        """Row by row, with the numbers where it does not pay."""
        heads = ("GPU", "cores with AMX", "states on the GPU", "step without", "best share", "step with it", "gain", "what takes longest",
                 "answer")
        rows = tuple(_row(case) for case in self.cases)
        none = tuple(("none", str(cores), "-", "-", "-", "-", "-", "the same cores", "0") for cores in CORES)
        return Table(f"The CPU's share of a batch of {self.sequences} sequences: {self.model}", heads, rows + none,
                     (_REMARK,),
                     words=(0, 7))


_REMARK = (f"Predicted. The best share is the one with the shortest step; the answer is 0 where it gains less than {LEAST_GAIN:.0%}. "
           f"A core trains at {FLOPS_PER_CORE / 1e12:g} TFLOP/s and updates {UPDATES_PER_CORE / 1e9:.2g} G parameters/s, as far as the "
           f"host's memory gives it: {', '.join(f'{gb:g} GB/s for {cores} cores' for cores, gb in BANDWIDTHS.items())}. "
           "Only the updates were measured.")


def _row(case: ShareCase) -> tuple[str, ...]:
    share = case.share
    gain = 1 - share.best_us / share.without_us
    best = f"{share.best} of {share.sequences}" if share.best else "0"
    gpu = case.gpu if case.fits else f"{case.gpu} (too large)"
    return (gpu, str(case.cores), f"{case.on_device:.0%}", time_text(share.without_us), best, time_text(share.best_us), f"{gain:+.1%}",
            share.binds, str(share.by_cpu))


def shares(model: Any, tokens: int, *, sequence: int | None = None, recompute: bool = False, clips: bool = False) -> ShareTable:
    """The table for a micro-batch of `tokens` tokens.

    model   as `report` takes it
    clips   whether the loop takes norms of gradients: then sums on the host come to the device

    Raises ConfigError and PlanError as `case_of` does.
    """
    cases = [(gpu, cores, case_of(model, on_host(find_device(gpu), cores), tokens, sequence=sequence, recompute=recompute))
             for gpu in GPUS for cores in CORES]
    first = cases[0][2]
    return ShareTable(first.shape.name, first.tokens // first.sequence, tuple(_solved(*of, clips) for of in cases))


def _solved(gpu: str, cores: int, case: Case, clips: bool) -> ShareCase:
    """The shortest steps with a share and without one, each with the placement that suits it."""
    plans = [case.plan_of(OUR_SYSTEM)]
    if case.shape.state_bytes_per_param * case.shape.params <= case.budget_bytes:
        plans.append(case.plan_at(OUR_SYSTEM, len(case.profile.units)))
    each = [(times, best_share(times), plan) for times, plan in ((share_times(case, cores, plan, clips), plan) for plan in plans)]
    times, found, plan = min(each, key=lambda of: of[1].best_us)
    share = answer(times, found.best, min(of.without_us for _, of, _ in each))
    return ShareCase(gpu, cores, plan.numel(Placement.GPU) / case.shape.params, case.row_of(OUR_SYSTEM, plan).fits, share)


def on_host(device: DeviceSpec, cores: int) -> DeviceSpec:
    """The device in a host of so many cores with AMX."""
    updates_gb_per_s = BANDWIDTHS[cores] * 1e9 / UPDATE_BYTES_PER_PARAM
    why = f"estimated: {cores} cores with AMX"
    sources = {**device.sources, "cpu_update_params_per_s": why, "host_memory_gb_per_s": why}
    return replace(device, name=f"{device.name}, {cores} cores", cpu_update_params_per_s=min(cores * UPDATES_PER_CORE, updates_gb_per_s),
                   host_memory_gb_per_s=BANDWIDTHS[cores], sources=sources)


def share_times(case: Case, cores: int, plan: Plan, clips: bool = False) -> ShareTimes:
    """What a step takes of each resource, from the rates of the device and of so many cores.

    plan    where the updates are done
    clips   whether the loop takes norms of gradients
    """
    shape, device, profile = case.shape, case.device, case.profile
    by_cpu = {unit.index: 0.0 for unit in profile.units}
    for row in plan.rows:
        if row.placement is Placement.CPU:
            by_cpu[row.unit] += row.numel
    parts = [(unit, by_cpu[unit.index] / max(unit.params, 1)) for unit in profile.units]
    on_host = sum(by_cpu.values())
    cores_of_host = replace(device, achieved_flops=cores * FLOPS_PER_CORE, memory_bytes_per_s=BANDWIDTHS[cores] * 1e9)
    of_one = analytic_profile(shape, cores_of_host, case.sequence, case.recompute, sequence=case.sequence)
    bandwidth = bytes_per_us(profile) or 1e3 * BANDWIDTHS[cores]
    up_us, down_us = 1e6 * HALF_BYTES / device.h2d_bytes_per_s, 1e6 * HALF_BYTES / device.d2h_bytes_per_s  # a parameter in 16 bits
    join_us = up_us * (shape.params - on_host) + _SUM_BYTES * on_host / bandwidth
    if clips:  # norms are the device's: sums come there for them
        join_us += up_us * on_host
    times = ShareTimes(
        case.tokens // case.sequence,
        device_us=profile.forward_us + profile.backward_us,
        cpu_sequence_us=of_one.forward_us + of_one.backward_us,
        begin_us=LAUNCH_US_PER_UNIT * len(profile.units) + down_us * (shape.params - on_host),
        update_us=sum(part * unit.cpu_update_us for unit, part in parts),
        join_us=join_us,
        host_us=sum(part * cpu_bytes(unit) for unit, part in parts) / bandwidth,
        share_host_us=HALF_BYTES * 2 * (shape.params + on_host) / bandwidth,
        sequence_host_us=HALF_BYTES * _PASSES * shape.params / bandwidth,
    )
    stalls_us = max(0.0, plan.predicted["step_us"] - times.step_us(0))
    return replace(times, around_us=stalls_us)

