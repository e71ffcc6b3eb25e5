"""Where the CPU's share of a batch pays: classes of GPU by classes of CPU.

Each GPU is put into a host of each class, and `cost_model.share_and_states` is asked where states
should rest and how many sequences the CPU should train: what updates on the CPU does not train
there. A host's figures are per core, up to what its memory gives:

    training    FLOPS_PER_CORE of matrix products in bf16 with AMX
    updates     the H200's host: 5.9 G parameters a second by 16 cores
    memory      BANDWIDTHS, by sockets

Without a GPU both parts would run on the same cores, so nothing is to be shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, CpuShare
from hytrain_fx.cost_model.share_and_states import Shared, ShareRates, solve_together
from hytrain_fx.errors import ConfigError, PlanError
from hytrain_fx.forecast.device import LAUNCH_US_PER_UNIT, DeviceSpec, analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case
from hytrain_fx.ir.figures import Table, time_text
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

    Raises ConfigError for a sequence that is longer than the batch, and ConfigError and PlanError
    as `case_of` does.
    """
    if sequence is not None and sequence > tokens:
        raise ConfigError(f"found sequences of {sequence} tokens in a batch of {tokens}, expected at least one sequence in the batch")
    cases = [(gpu, cores, case_of(model, on_host(find_device(gpu), cores), tokens, sequence=sequence, recompute=recompute))
             for gpu in GPUS for cores in CORES]
    first = cases[0][2]
    return ShareTable(first.shape.name, first.tokens // first.sequence, tuple(_solved(*of, clips) for of in cases))


def _solved(gpu: str, cores: int, case: Case, clips: bool) -> ShareCase:
    found = solved_together(case, cores, clips)
    on_device = found.plan.numel(Placement.GPU) / case.shape.params
    return ShareCase(gpu, cores, on_device, case.row_of(OUR_SYSTEM, found.plan).fits, found.share)


def solved_together(case: Case, cores: int, clips: bool = False) -> Shared:
    """Where states rest and what the CPU trains, for a case on a host of so many cores."""
    return solve_together(case.profile, share_rates(case, cores, clips), case.plan_of(OUR_SYSTEM), partial(_plan_within, case))


def _plan_within(case: Case, k: int) -> Plan:
    """The plan with so many units on the device. Raises PlanError where they do not fit there."""
    made = case.plan_at(OUR_SYSTEM, k)
    if case.shape.state_bytes_per_param * made.numel(Placement.GPU) > case.budget_bytes:
        raise PlanError(f"{k} units do not fit")
    return made


def on_host(device: DeviceSpec, cores: int) -> DeviceSpec:
    """The device in a host of so many cores with AMX."""
    updates_gb_per_s = BANDWIDTHS[cores] * 1e9 / UPDATE_BYTES_PER_PARAM
    why = f"estimated: {cores} cores with AMX"
    sources = {**device.sources, "cpu_update_params_per_s": why, "host_memory_gb_per_s": why}
    return replace(device, name=f"{device.name}, {cores} cores", cpu_update_params_per_s=min(cores * UPDATES_PER_CORE, updates_gb_per_s),
                   host_memory_gb_per_s=BANDWIDTHS[cores], sources=sources, workers=cores)


def share_rates(case: Case, cores: int, clips: bool = False) -> ShareRates:
    """What a share takes under any plan, from the rates of the device and of so many cores.

    clips   whether the loop takes norms of gradients
    """
    cores_of_host = replace(case.device, achieved_flops=cores * FLOPS_PER_CORE, memory_bytes_per_s=BANDWIDTHS[cores] * 1e9)
    of_one = analytic_profile(case.shape, cores_of_host, case.sequence, case.recompute, sequence=case.sequence)
    return ShareRates(case.tokens // case.sequence, of_one.forward_us + of_one.backward_us,
                      LAUNCH_US_PER_UNIT * len(case.profile.units), clips)
