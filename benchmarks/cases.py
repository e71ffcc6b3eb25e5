"""The cases that are compared, by name, and what is claimed of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.case import PEER_MODES, CannotRun, Case, unique

ON_HOST = ("gpu_states=0.0",)  # every state in host memory
ON_CPU = ("k=0",)  # every update by the CPU
STREAMED = (*ON_CPU, "weights=streamed")  # and every matrix in host memory
QUARTER = ("gpu_states=0.25",)  # a quarter of the states on the device


@dataclass(frozen=True)
class Claim:
    """What a step of `row` should be compared with a step of `against`.

    It is at least `must` times faster, or takes at most `must` of the time.
    """

    text: str
    row: Case
    against: Case
    must: float
    aim: float | None = None
    faster: bool = False

    def value(self, step_over: float) -> float:
        """The claimed figure, from the step of `row` over the step of `against`."""
        return 1.0 / step_over if self.faster else step_over

    def met(self, value: float, bound: float) -> bool:
        """Whether the figure keeps the bound."""
        return value >= bound if self.faster else value <= bound


@dataclass(frozen=True)
class CaseSet:
    """A named case: what it shows, the rows it needs, what is claimed."""

    title: str
    rows: tuple[Case, ...]
    claims: tuple[Claim, ...] = ()


def _sets() -> dict[str, CaseSet]:
    sets: dict[str, CaseSet] = {}
    floor, all_gpu, zero = Case("floor", "3b"), Case("all_gpu", "3b"), Case("zero_offload", "3b")
    ours, on_host, torchao = Case("ours", "3b"), Case("ours", "3b", options=ON_HOST), Case("torchao", "3b")
    sets["3b-host"] = CaseSet("3.1 G parameters, 8 k tokens, every state in host memory", (floor, all_gpu, on_host, zero, torchao), (
        Claim("faster than ZeRO-Offload", on_host, zero, 3.0, faster=True),
        Claim("faster than torchao", on_host, torchao, 1.65, faster=True),
        Claim("of the floor", on_host, floor, 1.6, 1.6)))
    clipped = replace(on_host, clip=1.0)
    sets["3b-clip"] = CaseSet("the same, gradients clipped to 1.0", (floor, on_host, clipped, replace(zero, clip=1.0)), (
        Claim("faster than ZeRO-Offload with clipping", clipped, replace(zero, clip=1.0), 2.5, faster=True),
        Claim("of the row without clipping", clipped, on_host, 1.15, 1.15)))
    autocast = [replace(case, autocast=True) for case in (floor, all_gpu, on_host)]
    sets["3b-autocast"] = CaseSet("the same with fp32 parameters under autocast, as torchao runs", (*autocast, torchao), (
        Claim("faster than torchao", autocast[2], torchao, 1.65, faster=True),))
    quarter = replace(ours, options=QUARTER)
    sets["3b-quarter"] = CaseSet("3.1 G parameters, 8 k tokens, 25% of the states on the GPU", (floor, quarter), (
        Claim("of the floor", quarter, floor, 1.4, 1.25),))
    sets["3b-free"] = CaseSet("3.1 G parameters, 8 k tokens, free memory", (floor, all_gpu, ours), (
        Claim("of all-GPU", ours, all_gpu, 1.03, 1.0),))
    longer = [replace(case, batch=8) for case in (floor, all_gpu, on_host)]
    sets["3b-16k"] = CaseSet("3.1 G parameters, 16 k tokens, every state in host memory", tuple(longer), (
        Claim("of all-GPU", longer[2], longer[1], 1.12, 1.03),))
    larger = [replace(case, size="7b") for case in (floor, quarter, zero, torchao)]
    sets["7b-quarter"] = CaseSet("6.7 G parameters, 8 k tokens, 25% of the states on the GPU", tuple(larger), (
        Claim("of the floor", larger[1], larger[0], 1.5, 1.25),))
    largest = [replace(case, size="10b") for case in (floor, all_gpu, ours)]
    sets["10b"] = CaseSet("10 G parameters, 8 k tokens, where all-GPU does not fit in 143 GB", tuple(largest), (
        Claim("of the floor", largest[2], largest[0], 1.5, 1.25),))
    by_cpu, streamed = (replace(ours, batch=8, options=options) for options in (ON_CPU, STREAMED))
    sets["3b-streamed"] = CaseSet("3.1 G parameters, 16 k tokens, weights on the host too", (by_cpu, streamed), (
        Claim("of weights on the device", streamed, by_cpu, 1.10, 1.03),))
    capped = [replace(of, batch=8, device_memory_gb=24.0, checkpointing=True) for of in
              (streamed, Case("zero_infinity", "3b"), Case("fsdp2_offload", "3b"))]
    sets["3b-24gb"] = CaseSet("3.1 G parameters, 16 k tokens, 24 GB of the GPU", tuple(capped), (
        Claim("faster than ZeRO-Infinity", capped[0], capped[1], 3.0, 5.0, faster=True),
        Claim("faster than FSDP2", capped[0], capped[2], 3.0, 5.0, faster=True)))
    seven, uncapped = replace(capped[0], size="7b"), Case("floor", "7b", 8)
    sets["7b-24gb"] = CaseSet("6.7 G parameters, 16 k tokens, 24 GB of the GPU", (seven, uncapped, replace(uncapped, checkpointing=True)), (
        Claim("of the floor of a whole GPU, without recompute", seven, uncapped, 1.35, 1.10),))
    tiny = [Case(mode, "tiny", 2, 32) for mode in ("floor", "all_gpu", "ours")]
    sets["smoke"] = CaseSet("a tiny model, on any machine: shows that the commands run, not how fast anything is", tuple(tiny))
    return sets


CASE_SETS: Mapping[str, CaseSet] = _sets()


def named(names: Iterable[str]) -> list[CaseSet]:
    """The cases of these names; `all` is all except `smoke`. Raises CannotRun for unknown names."""
    found: list[CaseSet] = []
    for name in names:
        if name == "all":
            found += [case_set for known, case_set in CASE_SETS.items() if known != "smoke"]
        elif name in CASE_SETS:
            found.append(CASE_SETS[name])
        else:
            raise CannotRun(f"found case {name!r}, expected one of all, {', '.join(CASE_SETS)}")
    return found


def rows_of(case_sets: Iterable[CaseSet], peers: bool = True) -> list[Case]:
    """Every row that the cases need, each once."""
    return unique([row for case_set in case_sets for row in case_set.rows if peers or row.mode not in PEER_MODES])
