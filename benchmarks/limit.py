"""The least time a step can take, from measured rates: of the GPU, the host's memory and the link.

    floor     forward and backward alone, timed
    memory    bytes of host memory that updates move, at its measured bandwidth
    link      bytes that cross PCIe each way, at the measured rate of the slower way

    bytes a parameter (AdamW, bf16)    host memory    link, each way
    updated by the CPU                      30              2
    streamed through the GPU                20             10
    the same, moments in bf16           22 and 12        2 and 6

Sources: hytrain_fx/cost_model/host_memory.py and ir/states.py for the bytes,
hytrain_fx/forecast/machine.py (`python -m hytrain_fx profile`) for the rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.states import ADAMW_TRAFFIC, StateTraffic


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of host memory, and of the link each way while both are busy."""

    memory: float
    to_device: float
    to_host: float

    @classmethod
    def of(cls, device: DeviceSpec) -> Rates | None:
        """Of a measured machine; None where its host memory's bandwidth is not known."""
        gb_per_s = device.host_memory_gb_per_s
        return None if gb_per_s is None else cls(1e9 * gb_per_s, device.h2d_bytes_per_s, device.d2h_bytes_per_s)


@dataclass(frozen=True)
class Limit:
    """The terms of `limit_of`, and the share of parameters that is best streamed."""

    floor_s: float
    memory_s: float
    link_s: float
    streamed: float

    @property
    def step_s(self) -> float:
        """The largest term."""
        return max(self.floor_s, self.memory_s, self.link_s)

    @property
    def binds(self) -> str:
        """Which terms are the largest."""
        terms = {"floor": self.floor_s, "memory": self.memory_s, "link": self.link_s}
        return " and ".join(name for name, term_s in terms.items() if term_s >= (1 - 1e-9) * self.step_s)


def limit_of(floor_s: float, params: float, rates: Rates, traffic: StateTraffic = ADAMW_TRAFFIC) -> Limit:
    """The largest of floor, memory and link for `params` bf16 parameters with states on the host.

    With a share y streamed, and the rest updated by the CPU,

        memory(y) = params * (30 (1 - y) + 20 y) / memory rate      falls with y
        link(y)   = params * (2 (1 - y) + 10 y) / link rate         rises with y

    so that the best y is where both are equal, or 1. (At y = 0 the larger one is memory, unless the
    link is slower than a fifteenth of it: then y is 0.) No order of work can be faster: each byte
    has to be moved. The CPU's own rate is left out.
    """
    updated, crosses = _bytes_of(traffic)
    link = min(rates.to_device, rates.to_host)
    falls, rises = (updated - 2 * crosses) / rates.memory, (crosses - HALF_BYTES) / link
    y = min(max((updated / rates.memory - HALF_BYTES / link) / (falls + rises), 0.0), 1.0)
    return Limit(floor_s, *seconds_of_mix(params, y, rates, traffic), y)


def seconds_of_mix(params: float, streamed: float, rates: Rates, traffic: StateTraffic = ADAMW_TRAFFIC) -> tuple[float, float]:
    """Seconds of host memory and of the link where this share of the parameters is streamed."""
    updated, crosses = _bytes_of(traffic)
    moved, crossed = updated + (2 * crosses - updated) * streamed, HALF_BYTES + (crosses - HALF_BYTES) * streamed
    return params * moved / rates.memory, params * crossed / min(rates.to_device, rates.to_host)


def _bytes_of(traffic: StateTraffic) -> tuple[int, int]:
    """Bytes a parameter: of host memory by the CPU, and over the link each way streamed."""
    return 2 * HALF_BYTES + traffic.updated_bytes(1, HALF_BYTES), traffic.streamed_bytes(1, HALF_BYTES)
