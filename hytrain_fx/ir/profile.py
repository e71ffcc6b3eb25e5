"""What each unit costs on one machine: the measured or estimated numbers for a plan."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.states import ADAMW_TRAFFIC, StateTraffic

TIMES = ("forward_us", "backward_us", "cpu_update_us", "gpu_update_us", "d2h_us", "h2d_us")
STREAM_TIMES = ("stream_in_us", "stream_out_us")
STEP_TIMES = ("commit_us", "launching_us", "between_us", "bubble_us")  # of no unit
COLLECTIVE_TIMES = ("reduce_scatter_us", "all_gather_us")
FETCH_TIMES = ("fetch_us",)
GATHER_TIMES = ("gather_us",)


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """Times of one unit in microseconds, each with the resource to itself unless measured in place.

    Where several ranks train one model these are one rank's, and so are `params` and `grad_bytes`:
    of the shards that it updates.

    params           elements
    grad_bytes       bytes of its gradients in their own dtype; its new weights take as many
    forward_us       its share of the forward
    backward_us      its share of the backward, recomputed activations included
    cpu_update_us    update of all its parameters by the CPU workers
    gpu_update_us    update of all its parameters on the device
    d2h_us, h2d_us   copy of its gradients to the host, of its new weights to the device
    stream_in_us     copy of all its fp32 states to the device while as much goes back; 0 = they
                     cannot be streamed
    stream_out_us    copy of all its fp32 states back to the host while as much comes in
    param_numels     elements of each of its parameters, in the order of their flat ranges; () = not
                     known, the unit is never split
    traffic          bytes of its states; AdamW's, where nothing is said
    grain_params     where a parameter may be cut, it is at multiples of so many elements; 0 =
                     parameters are placed whole
    reduce_scatter_us    of the unit's gradients among all ranks, which leaves each its shards'
    all_gather_us    of the unit's new weights
    fetched_params   elements whose weights rest on the host as long as the CPU updates them, in 16
                     bits; each forward and each backward brings them to the device
    fetch_us         copy of all of them to the device
    gathered_params  elements of weights that ranks keep in shards, all ranks' together; each
                     forward and each backward gathers them. Of shards on the host this rank's are
                     `fetched_params`, and come first
    gather_us        a gather of all of them
    """

    index: int
    name: str
    params: int
    grad_bytes: int
    forward_us: float
    backward_us: float
    cpu_update_us: float
    gpu_update_us: float
    d2h_us: float
    h2d_us: float
    stream_in_us: float = 0.0
    stream_out_us: float = 0.0
    param_numels: tuple[int, ...] = ()
    traffic: StateTraffic = ADAMW_TRAFFIC
    grain_params: int = 0
    reduce_scatter_us: float = 0.0
    all_gather_us: float = 0.0
    fetched_params: int = 0
    fetch_us: float = 0.0
    gathered_params: int = 0
    gather_us: float = 0.0

    def __post_init__(self) -> None:
        if self.params <= 0 or self.grad_bytes <= 0:
            raise PlanError(f"unit {self.index} ({self.name}) has {self.params} parameters and {self.grad_bytes} gradient bytes; "
                            "expected both > 0: a unit without managed parameters belongs to its neighbour")
        if self.param_numels and sum(self.param_numels) != self.params:
            raise PlanError(f"unit {self.index} ({self.name}) has {self.params} parameters, those of its tensors sum to "
                            f"{sum(self.param_numels)}; expected the same")
        if self.grain_params < 0:
            raise PlanError(f"unit {self.index} ({self.name}) has grain_params={self.grain_params}, expected a number of elements >= 0")
        if not 0 <= self.fetched_params <= self.params:
            raise PlanError(f"unit {self.index} ({self.name}) has fetched_params={self.fetched_params}, expected 0..{self.params}")
        if self.gathered_params < 0:
            raise PlanError(f"unit {self.index} ({self.name}) has gathered_params={self.gathered_params}, expected a number >= 0")
        for name in (*TIMES, *STREAM_TIMES, *COLLECTIVE_TIMES, *FETCH_TIMES, *GATHER_TIMES):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"unit {self.index} ({self.name}) has {name}={value}, expected a finite time >= 0")

    @property
    def stream_bytes(self) -> int:
        """Bytes of its states that cross the link each way when it is streamed."""
        return self.traffic.streamed_bytes(self.params, self.grad_bytes)

    @property
    def fetch_bytes(self) -> int:
        """Bytes of the weights that one fetch brings."""
        return HALF_BYTES * self.fetched_params

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that one gather brings, all ranks' shards together."""
        return HALF_BYTES * self.gathered_params

    @property
    def reloaded_share(self) -> float:
        """Share 0..1 of its new weights that go to the device when the CPU has updated them.

        The others rest on the host.
        """
        return 1.0 - self.fetched_params / self.params

    @property
    def alpha(self) -> float:
        """Device update time over CPU update time; infinite when the CPU's is not measurable."""
        return self.gpu_update_us / self.cpu_update_us if self.cpu_update_us else math.inf

    @property
    def can_stream(self) -> bool:
        """Whether its states can be brought to the device and back within a step."""
        return self.stream_in_us > 0 and self.stream_out_us > 0


@dataclass(frozen=True, slots=True)
class Profile:
    """The units of a model in forward order with their costs, and where the numbers come from.

    `tokens` is the size of one micro-batch where known. `steps` counts the steps measured; 0 =
    estimated.

    `host_memory_gb_per_s` is the bandwidth of the host's memory in 10^9 bytes a second. None = not
    known: then times stand as measured, and only times measured in place include what copies and
    updates take from one another.

    `commit_us` is how long after the begin of the backward on the device the launching thread ended
    `step()`: it launches the backward first. `launching_us` is the time it takes from the forward's
    last wait to there; 0 = not known. Where this thread can run ahead of updates, only what is
    longer than a step delays the next commit.

    Of several micro-batches a unit's times are those of the first forward and the last backward.
    `between_us` is what lies between these two. `bubble_us` is how long the device stands still
    between a step's last backward and the next step's first forward, where it is a stage of a
    pipeline and waits for another one.

    `node_ranks` ranks share the host and its memory. `skew` is how many times as long as the others
    one of them takes for all that it does itself; collectives wait for it.

    Raises PlanError when the units are not numbered 0..n-1 in order, for a bandwidth that is not
    positive, for fewer than one rank, and for a skew below 1.
    """

    units: tuple[UnitProfile, ...]
    device: str
    host: str
    versions: dict[str, str] = field(default_factory=dict)
    tokens: int | None = None
    steps: int = 0
    host_memory_gb_per_s: float | None = None
    commit_us: float = 0.0
    launching_us: float = 0.0
    between_us: float = 0.0
    bubble_us: float = 0.0
    node_ranks: int = 1
    skew: float = 1.0

    def __post_init__(self) -> None:
        if self.node_ranks < 1:
            raise PlanError(f"found {self.node_ranks} ranks on a host, expected at least 1")
        if not (math.isfinite(self.skew) and self.skew >= 1):
            raise PlanError(f"found skew={self.skew}, expected a finite factor >= 1 on the times of the slowest rank")
        for name in STEP_TIMES:
            if not (math.isfinite(us := getattr(self, name)) and us >= 0):
                raise PlanError(f"found {name}={us}, expected a finite time >= 0")
        bandwidth = self.host_memory_gb_per_s
        if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
            raise PlanError(f"found a host memory bandwidth of {bandwidth} GB/s, expected more than 0, or None where it is not known")
        if not self.units or [u.index for u in self.units] != list(range(len(self.units))):
            raise PlanError(f"units must be numbered 0..n-1 in forward order, found {[u.index for u in self.units]}")

    @property
    def params(self) -> int:
        """Managed parameters, in elements."""
        return sum(u.params for u in self.units)

    @property
    def forward_us(self) -> float:
        """t_f: the whole forward."""
        return sum(u.forward_us for u in self.units)

    @property
    def backward_us(self) -> float:
        """t_bwd: the whole backward."""
        return sum(u.backward_us for u in self.units)

    @property
    def compute_us(self) -> float:
        """All forwards and backwards of a step."""
        return self.forward_us + self.between_us + self.backward_us

    def with_tokens(self, factor: float) -> Profile:
        """The profile of a step with so many times as many tokens: updates take as long."""
        units = tuple(replace(u, forward_us=factor * u.forward_us, backward_us=factor * u.backward_us) for u in self.units)
        return replace(self, units=units, between_us=factor * self.between_us, bubble_us=factor * self.bubble_us)

    @property
    def cpu_update_us(self) -> float:
        """C = t_upd_cpu(n): all units updated by the CPU."""
        return sum(u.cpu_update_us for u in self.units)

    @property
    def gpu_update_us(self) -> float:
        """t_upd_gpu(n): all units updated on the device."""
        return sum(u.gpu_update_us for u in self.units)

    @property
    def d2h_us(self) -> float:
        """All gradients to the host."""
        return sum(u.d2h_us for u in self.units)

    @property
    def h2d_us(self) -> float:
        """All new weights to the device."""
        return sum(u.h2d_us for u in self.units)

    @property
    def has_collectives(self) -> bool:
        """Whether several ranks train the model."""
        return self.node_ranks > 1 or any(u.reduce_scatter_us or u.all_gather_us for u in self.units)

    @property
    def fetches(self) -> bool:
        """Whether weights rest on the host, wherever the CPU updates them."""
        return any(u.fetched_params for u in self.units)

    @property
    def gathers(self) -> bool:
        """Whether ranks keep weights in shards."""
        return any(u.gathered_params for u in self.units)

    @property
    def can_stream(self) -> bool:
        """Whether the states of every unit can be streamed."""
        return all(u.can_stream for u in self.units)

    @property
    def alpha(self) -> float:
        """Device over CPU update time of the whole model."""
        return self.gpu_update_us / self.cpu_update_us if self.cpu_update_us else math.inf

    def to_json(self) -> str:
        """This profile as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read the text of `to_json`. Raises PlanError where it is not such a text."""
        try:
            raw: dict[str, Any] = dict(json.loads(text))
            units = tuple(_unit_of(unit) for unit in raw.pop("units"))
            for gone in ("peak_bytes", "free_device_bytes"):  # earlier versions saved them
                raw.pop(gone, None)
            return cls(units=units, **raw)
        except PlanError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise PlanError(f"this is not a saved profile: {error}; expected the text that Profile.to_json() writes") from error


def _unit_of(raw: dict[str, Any]) -> UnitProfile:
    return UnitProfile(**{**raw, "param_numels": tuple(raw.get("param_numels", ())), "traffic": StateTraffic(**raw.get("traffic", {}))})
