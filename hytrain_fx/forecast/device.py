"""What a machine can do, and from that a profile nobody measured.

It serves reports made without the machine.

A layer's forward takes the longer of its arithmetic and its memory traffic,

    forward = max( (2 matmul_params + 2 * 2 attention_width * sequence / (2 if causal))
                   * tokens / achieved_flops,
                   bytes(weights, twice the saved activations) / memory_bytes_per_s )

its backward twice that, and once more with recomputation. The step is committed when the launching
thread is through with the backward. Every figure says where it comes from. A run measures its own
figures.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.shapes import ModelShape, UnitShape
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.named_files import json_object
from hytrain_fx.ir.profile import Profile, UnitProfile

# Of a unit's forward and backward, by the launching thread: 25 to 35 ms for the 29 units of a
# Llama, measured on the host of an H200.
LAUNCH_US_PER_UNIT = 1000.0
# 16-bit training: gradients and new weights cross the link in 16 bit
GRAD_BYTES_PER_PARAM = HALF_BYTES
SOURCE_KINDS = ("measured", "data sheet", "estimated", "given")
MOST_TOKENS = 10**12
NETWORK_BYTES_PER_S = 50e9  # of one GPU to other machines where nothing is known: 400 Gb/s
NOT_FIGURES = ("name", "sources", "about", "host_gpus", "workers")
HOST_FIGURES = ("cpu_update_params_per_s", "host_memory_bytes", "host_memory_gb_per_s")
_MAY_BE_UNKNOWN = ("host_memory_gb_per_s", "gpu_link_bytes_per_s", "network_bytes_per_s")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Rates of one device and its host.

    achieved_flops            of a compiled training step's matrix products, FLOP/s
    memory_bytes, memory_bytes_per_s    of the device
    d2h_bytes_per_s, h2d_bytes_per_s    pinned copies with both directions busy
    cpu_update_params_per_s   exact AdamW on fp32 states by all cores of the host, 16-bit gradient
                              in and weight out; taken for moments in bf16 too
    gpu_update_params_per_s   the same on the device
    host_memory_bytes         of the host
    host_memory_gb_per_s      what its memory gives to all cores and copies together, 10^9 bytes a
                              second; None = not known
    sources                   where each figure comes from: "measured: ...", "data sheet: ...",
                              "estimated: ..." or "given: ..."
    about                     of a measured machine: its hardware, versions, the date
    gpu_link_bytes_per_s      of one GPU to the others of its machine, each way; None = over its
                              link to the host
    network_bytes_per_s       of one GPU to other machines, each way; None = not known
    host_gpus                 GPUs of the machine whose host the figures are of; None = as many as
                              are asked for
    workers                   threads of the host that update at `cpu_update_params_per_s`
                              together; None = not known

    Raises ConfigError for a figure that is not positive, or whose source is missing or of another
    kind.
    """

    name: str
    achieved_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    cpu_update_params_per_s: float
    gpu_update_params_per_s: float
    host_memory_bytes: int
    sources: Mapping[str, str]
    host_memory_gb_per_s: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    gpu_link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    host_gpus: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.host_gpus is not None and (type(self.host_gpus) is not int or self.host_gpus < 1):
            raise ConfigError(f"device {self.name!r}: found host_gpus={self.host_gpus!r}, expected a whole number >= 1")
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise ConfigError(f"device {self.name!r}: found workers={self.workers!r}, expected a whole number >= 1")
        for name, value in self.figures().items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"device {self.name!r}: found {name}={value!r}, expected a number > 0")
            if not str(self.sources.get(name, "")).startswith(SOURCE_KINDS):
                raise ConfigError(f"device {self.name!r}: found {self.sources.get(name)!r} as the source of {name}, "
                                  f"expected a text that begins with {', '.join(SOURCE_KINDS)}")

    def figures(self) -> dict[str, float]:
        """Every figure that is known, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_FIGURES}
        return {name: value for name, value in named.items() if name not in _MAY_BE_UNKNOWN or value is not None}

    def on_host_of(self, other: DeviceSpec) -> DeviceSpec:
        """This device in the other's host: CPU update rate, host memory and its bandwidth."""
        taken = {name: getattr(other, name) for name in (*HOST_FIGURES, "host_gpus", "workers")}
        sources = {**self.sources, **{name: other.sources[name] for name in HOST_FIGURES if name in other.sources}}
        return replace(self, name=f"{self.name} in the host of {other.name}", sources=sources, about={**self.about, **other.about}, **taken)

    def collective_us(self, nbytes: float, ranks: Ranks) -> float:
        """A reduce-scatter or an all-gather of `nbytes` among all ranks; 0 for one rank.

        Each rank sends and receives the bytes of all others' parts. Between machines a machine's
        GPUs share what crosses, each over its own adapter, while their links carry the rest: the
        slower of both counts. What a collective takes besides bytes is left out.
        """
        sent_bytes = nbytes * (ranks.count - 1) / ranks.count
        link = self.gpu_link_bytes_per_s or min(self.d2h_bytes_per_s, self.h2d_bytes_per_s)
        within_us = 1e6 * sent_bytes / link if ranks.gpus > 1 else 0.0
        between_us = 1e6 * sent_bytes / ranks.gpus / (self.network_bytes_per_s or NETWORK_BYTES_PER_S) if ranks.nodes > 1 else 0.0
        return max(within_us, between_us)

    def in_machine_of(self, ranks: Ranks) -> DeviceSpec:
        """This device as one of the machines' GPUs, with every figure that is used in place.

        A host of fewer GPUs is taken to have as many times the cores and the memory. Its memory's
        bandwidth is not raised: two H200 and 32 cores shared 182 GB/s, where one with 16 cores has
        215. For a link or a network that is not known what is assumed is written down.
        """
        if ranks.count == 1:
            return self
        changed: dict[str, Any] = {}
        sources = dict(self.sources)
        if self.host_gpus is not None and self.host_gpus < ranks.gpus:
            times = ranks.gpus / self.host_gpus
            for name in ("cpu_update_params_per_s", "host_memory_bytes"):
                changed[name] = type(getattr(self, name))(times * getattr(self, name))
                sources[name] = f"estimated: {times:g} times that of a host of {self.host_gpus} ({self.sources[name]})"
            if self.host_memory_gb_per_s is not None:
                sources["host_memory_gb_per_s"] += f"; taken as it is for a host of {ranks.gpus} GPUs"
            changed["host_gpus"] = ranks.gpus
            changed["workers"] = None if self.workers is None else round(times * self.workers)
        if self.gpu_link_bytes_per_s is None and ranks.gpus > 1:
            changed["gpu_link_bytes_per_s"] = min(self.d2h_bytes_per_s, self.h2d_bytes_per_s)
            sources["gpu_link_bytes_per_s"] = "estimated: no link of its own, as fast as copies to the host, and apart from them"
        if self.network_bytes_per_s is None and ranks.nodes > 1:
            changed["network_bytes_per_s"] = NETWORK_BYTES_PER_S
            sources["network_bytes_per_s"] = "estimated: assumed, an adapter of 400 Gb/s for each GPU"
        return replace(self, sources=sources, **changed)

    def to_json(self) -> str:
        """This spec as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DeviceSpec:
        """Read the text of `to_json`. Raises ConfigError where it is not such a text."""
        try:
            raw = json_object(text)
        except ValueError as error:
            raise ConfigError(f"this is not a device description: {error}; expected a JSON object with {_EXPECTED}") from error
        return cls.from_figures(raw)

    @classmethod
    def from_figures(cls, raw: Mapping[str, object]) -> DeviceSpec:
        """A spec from its figures by name; those without a source are "given".

        Raises ConfigError for a name that is missing, unknown, or of another kind.
        """
        known = {f.name: f for f in fields(cls)}
        wrong = [_unknown(name, list(known)) for name in raw if name not in known]
        needed = [name for name, f in known.items() if name != "sources" and f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in needed if name not in raw]
        wrong += [f"there is no {', '.join(missing)}"] if missing else []
        kinds: tuple[tuple[str, type], ...] = (("name", str), ("about", dict), ("sources", dict))
        wrong += [f"{name} is {raw[name]!r}" for name, kind in kinds if not isinstance(raw.get(name, kind()), kind)]
        if wrong:
            raise ConfigError(f"this is not a device description: {'; '.join(wrong)}; expected {_EXPECTED}")
        named: Any = raw.get("sources", {})
        figures: dict[str, Any] = {name: value for name, value in raw.items() if name != "sources"}
        for name in ("memory_bytes", "host_memory_bytes"):  # 24e9 is a whole number, too
            if isinstance(figures[name], float) and figures[name].is_integer():
                figures[name] = int(figures[name])
        sources = {name: named.get(name, "given: no source was named") for name, value in figures.items()
                   if name not in NOT_FIGURES and value is not None}
        return cls(sources=sources, **figures)


_EXPECTED = ", ".join(f.name for f in fields(DeviceSpec))


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name!r} is not known" + (f" (do you mean {near[0]}?)" if near else "")


def analytic_profile(
    shape: ModelShape, device: DeviceSpec, tokens: int, recompute: bool = False, *, sequence: int | None = None, ranks: Ranks = ONE_RANK
) -> Profile:
    """Times of every unit for one micro-batch of `tokens` tokens in 16 bit, from FLOPs and bytes.

    `sequence` is the length of one sequence, by default the shape's longest that is not above
    `tokens`; `recompute` adds a second forward of each layer to its backward. Raises ConfigError
    for lengths that are not positive.

    With moments in bf16 less crosses the link and the host's memory. Update rates stay what they
    are a parameter, on both sides: the kernel does more arithmetic for each, 1.3 to 1.5 times as
    much on a core, so no rate rises. Where cores and not memory bind, updates may take longer.

    Of several `ranks` it is what one takes for its own micro-batch of `tokens`: updates are of its
    shards, by its part of the host's cores; forward and backward are whole.
    """
    sequence = min(tokens, shape.context) if sequence is None else sequence
    if tokens < 1 or sequence < 1 or max(tokens, sequence) > MOST_TOKENS:
        raise ConfigError(f"found {tokens} tokens in sequences of {sequence}, expected 1 to {MOST_TOKENS} of both")
    units = tuple(_unit_profile(u, shape, device, tokens, sequence, recompute, ranks) for u in shape.units)
    return Profile(units, device.name, f"host of {device.name}", tokens=tokens, steps=0, host_memory_gb_per_s=device.host_memory_gb_per_s,
                   commit_us=LAUNCH_US_PER_UNIT * len(units), node_ranks=ranks.gpus, skew=ranks.skew)


def _unit_profile(
    u: UnitShape, shape: ModelShape, device: DeviceSpec, tokens: int, sequence: int, recompute: bool, ranks: Ranks,
) -> UnitProfile:  # fmt: skip
    attention = 4 * u.attention_width * sequence / (2 if shape.causal else 1)
    arithmetic_s = (2 * u.matmul_params + attention) * tokens / device.achieved_flops
    # An embedding reads only the rows it looks up. What multiplies a whole sample uses its weights
    # again.
    weight_params = min(u.matmul_params, shape.params) or tokens * u.output_values
    traffic_bytes = 2 * weight_params + 2 * 2 * (u.saved_values + u.output_values) * tokens
    forward_us = 1e6 * max(arithmetic_s, traffic_bytes / device.memory_bytes_per_s)
    backward_us = forward_us * (3 if recompute and u.attention_width else 2)
    params = ranks.shard(u.params)
    grad_bytes = GRAD_BYTES_PER_PARAM * params
    stream_bytes = shape.traffic.streamed_bytes(params, grad_bytes)
    collective_us = device.collective_us(GRAD_BYTES_PER_PARAM * u.params, ranks)
    return UnitProfile(
        u.index, u.name, params, grad_bytes, forward_us, backward_us,
        cpu_update_us=1e6 * params * ranks.gpus / device.cpu_update_params_per_s,
        gpu_update_us=1e6 * params / device.gpu_update_params_per_s,
        d2h_us=1e6 * grad_bytes / device.d2h_bytes_per_s,
        h2d_us=1e6 * grad_bytes / device.h2d_bytes_per_s,
        stream_in_us=1e6 * stream_bytes / device.h2d_bytes_per_s,
        stream_out_us=1e6 * stream_bytes / device.d2h_bytes_per_s,
        traffic=shape.traffic,
        reduce_scatter_us=collective_us, all_gather_us=0.0 if shape.in_shards else collective_us,
        fetched_params=params if shape.on_host else 0,
        fetch_us=1e6 * HALF_BYTES * params / device.h2d_bytes_per_s if shape.on_host else 0.0,
        gathered_params=u.params if shape.in_shards else 0,
        gather_us=collective_us if shape.in_shards else 0.0)
