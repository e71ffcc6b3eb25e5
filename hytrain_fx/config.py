"""The options of `hytrain_fx.compile`, in one frozen value, each checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.plan import Plan

EngineName = Literal["auto", "native", "torch", "deepspeed"]
Planner = Literal["seed", "cotrain", "windowed"]


@dataclass(frozen=True)
class Config:
    """Options of `compile`. Raises ConfigError naming the option, what was found and what is accepted.

    k              units updated on the device: "auto" solves it from measured times, 0 = every unit on the CPU
    plan           a saved Plan to obey instead of solving one
    planner        which rule solves k: "windowed" (each layer's own window), "seed" (HyTrainDNN's equation) or "cotrain"
    stream         share 0..1 of the parameters not resident on the device whose states are brought there each step instead of being
                   updated by the CPU; "auto" solves it on CUDA together with k (planner "windowed"), and is 0 with the model on the CPU
    gpu_states     what may rest on the device: "auto" (what is free, by whole units), a fraction 0..1 of the states, or bytes
    host_memory    bytes the states may take on the host, None = what the host has available; `shadow_memory` comes on top
    speculate      whether updates by the CPU may begin before step(): "auto" where the loop waits for the GPU between backward() and step()
                   (loss.item(), a norm that is printed) or scales gradients by a factor that can be guessed (clipping), and has done the
                   same for some steps; True in every backward, False in none. The training is the same; native engine, bf16 and fp32
                   parameters
    shadow_memory  bytes of host memory for states beside the old ones, in updates on a guess: those that begin before step(), and those
                   whose gradients' factors (clipping, loss scale) are still unknown; 12 bytes a parameter, with amsgrad 16. None = half of
                   what is available when there is first such an update, 0 = no update begins so
    replan_every   steps within which a change of their length is followed: times are measured anew and states move where that pays;
                   0 = the plan made after the warm-up stays
    warmup_steps   steps measured before a plan is solved
    engine         which engine runs the updates of Adam and AdamW; other optimizers run on "torch"
    workers        CPU update threads, None = physical cores less the launching threads
    pin_workers    keep each CPU update thread on a core of its own, where cores are known and free. Off: where other threads want those
                   cores too, one held-up worker holds up its unit (8% of a step on a virtual machine of 16 cores)
    ring_bytes     device memory for gradients on their way to the host, None = the least of four of the largest gradients, twice all of
                   them, and 640 MB (338 MB where states are streamed)
    autocast_copies  fp32 weights that a model under autocast reads in bf16 alone rest on the device as bf16 copies; their fp32 memory is
                   there only while the loop looks at them, weights and gradients travel in 16 bits, no bit of training changes
    timeout_s      seconds after which a wait on a worker or a copy is an error
    dump           folder that receives each graph's text before and after each pass
    dynamic        handed on to torch.compile
    options        Inductor options handed on to torch.compile
    mode           handed on to torch.compile; "reduce-overhead" is refused (CUDA graphs are not shown to work)
    """

    k: int | Literal["auto"] = "auto"
    plan: Plan | None = None
    planner: Planner = "windowed"
    stream: float | Literal["auto"] = "auto"
    gpu_states: float | int | Literal["auto"] = "auto"
    host_memory: int | None = None
    speculate: bool | Literal["auto"] = "auto"
    shadow_memory: int | None = None
    replan_every: int = 20
    warmup_steps: int = 5
    engine: EngineName = "auto"
    workers: int | None = None
    pin_workers: bool = False
    ring_bytes: int | None = None
    autocast_copies: bool = True
    timeout_s: float = 120.0
    dump: Path | None = None
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None

    def __post_init__(self) -> None:
        _require(self.k == "auto" or (_is_int(self.k) and self.k >= 0), "k", self.k, '"auto" or an int >= 0')
        _require(self.plan is None or isinstance(self.plan, Plan), "plan", self.plan, "a hytrain_fx Plan or None")
        _require(self.plan is None or self.k == "auto", "plan", "a plan and k", "one of the two: a plan already fixes k")
        _require(self.planner in get_args(Planner), "planner", self.planner, f"one of {get_args(Planner)}")
        _require(self.stream == "auto" or _is_share(self.stream), "stream", self.stream, '"auto" or a number between 0 and 1')
        _require(_valid_gpu_states(self.gpu_states), "gpu_states", self.gpu_states,
                 '"auto", a float between 0 and 1 (fraction of the states), or an int >= 0 (bytes)')
        _require(_is_none_or_positive(self.host_memory), "host_memory", self.host_memory, "None or a positive int (bytes)")
        _require(self.speculate == "auto" or isinstance(self.speculate, bool), "speculate", self.speculate, '"auto", True or False')
        _require(self.shadow_memory in (None, 0) or _is_none_or_positive(self.shadow_memory), "shadow_memory", self.shadow_memory,
                 "None or an int >= 0 (bytes)")
        _require(_is_int(self.replan_every) and self.replan_every >= 0, "replan_every", self.replan_every, "an int >= 0")
        _require(_is_int(self.warmup_steps) and self.warmup_steps >= 1, "warmup_steps", self.warmup_steps, "an int >= 1")
        _require(self.engine in get_args(EngineName), "engine", self.engine, f"one of {get_args(EngineName)}")
        _require(_is_none_or_positive(self.workers), "workers", self.workers, "None or a positive int")
        _require(isinstance(self.pin_workers, bool), "pin_workers", self.pin_workers, "True or False")
        _require(isinstance(self.autocast_copies, bool), "autocast_copies", self.autocast_copies, "True or False")
        _require(_is_none_or_positive(self.ring_bytes), "ring_bytes", self.ring_bytes, "None or a positive int (bytes)")
        _require(isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0, "timeout_s", self.timeout_s, "seconds > 0")
        _require(self.mode != "reduce-overhead" and self.mode != "max-autotune", "mode", self.mode,
                 'a mode without CUDA graphs: None, "default" or "max-autotune-no-cudagraphs"')

    @classmethod
    def from_options(cls, **options: Any) -> Config:
        """A Config from keyword options. Raises ConfigError for a name that is no option."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        return cls(**options)


def _require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"option {name}={found!r}: expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _is_none_or_positive(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _valid_gpu_states(value: object) -> bool:
    if value == "auto":
        return True
    if isinstance(value, float):
        return 0.0 <= value <= 1.0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
