"""The options of `hytrain_fx.compile`, in one frozen value, each checked on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.weights_choice import WeightsChoice

EngineName = Literal["auto", "native", "torch", "deepspeed"]
Planner = Literal["seed", "cotrain", "windowed"]
OnNonfinite = Literal["allow", "skip", "raise"]
Moments = Literal["fp32", "bf16"]
Weights = Literal["resident", "streamed", "sharded", "sharded_host", "auto"]
CpuShare = float | Literal["auto"]


@dataclass(frozen=True)
class Config:
    """Options of `compile`.

    Raises ConfigError, which names the option, what was found and what is accepted.
    k              units updated on the device, at most all of them: "auto" solves it from measured
                   times, 0 = every unit on the CPU
    plan           a saved Plan to obey instead of solving one
    planner        which rule solves k: "windowed" (each layer's own window), "seed" (HyTrainDNN's
                   equation) or "cotrain"
    stream         share 0..1 of the parameters not resident on the device whose states visit it
                   each step to be updated there, not by the CPU; "auto" solves it on CUDA together
                   with k (planner "windowed"), and is 0 with the model on the CPU
    gpu_states     what may rest on the device: "auto" (what is free, by whole units), a fraction
                   0..1 of the states, or bytes
    host_memory    bytes the states may take on the host, None = what the host has available;
                   `shadow_memory` comes on top
    speculate      whether updates by the CPU may begin before step(). "auto": where the loop has
                   for some steps waited for the GPU between backward() and step() (loss.item(),
                   a norm that is printed), or scaled gradients by a factor that can be guessed
                   (clipping). True: in every backward. False: in none. The training is the same;
                   native engine, bf16 and fp32 parameters
    shadow_memory  bytes of host memory for new states next to the old ones, in updates on a guess:
                   those that begin before step(), and those whose gradients' factors (clipping,
                   loss scale) are still unknown; 12 bytes a parameter, with amsgrad 16. None = half
                   of what is available at the first such update, 0 = no update begins on a guess
    replan_every   steps within which a change of their length is followed: times are measured again
                   and states move where that pays; 0 = the plan made after the warm-up stays
    warmup_steps   steps measured before a plan is solved
    engine         which engine runs the updates of Adam and AdamW; other optimizers run on "torch"
    workers        CPU update threads, None = physical cores less the launching threads; more
                   than there are cores is a warning. If they fit on the GPU's socket they stay
                   there, with the host's states; else all sockets are used
    pin_workers    keep each CPU update thread on its own core, where cores are known and free.
                   Off by default: where other threads want those cores too, one late worker delays
                   its unit (8% of a step on a virtual machine of 16 cores)
    ring_bytes     device memory for gradients on their way to the host, None = the least of four of
                   the largest gradients, twice all of them, and 640 MB (338 MB where states are
                   streamed)
    autocast_copies  fp32 weights that a model under autocast reads in bf16 only rest on the device
                   as bf16 copies. Their fp32 memory exists only while the loop looks at them,
                   weights and gradients travel in 16 bits, and no bit of training changes
    on_nonfinite   what happens to a step with a gradient that holds NaN or infinities: "allow", the
                   update computes with them, as in torch; "skip", the step is left out, as
                   GradScaler does; "raise", it is left out and NonFiniteGradientError is raised, at
                   that step(), the next forward or the next step(). For the last two each update on
                   the device waits for the end of the backward, and `step()` waits for the device
                   with an engine other than the native one. All stages of a pipeline need the same,
                   and leave steps out together
    moments        in what states of AdamW, Adam and Lion rest. "bf16": in 16 bits, rounded up or
                   down by chance, so that their mean is right; masters stay exact. An update on the
                   CPU and its copies move 22 bytes of host memory a parameter, not 30. Parameter
                   groups may say it themselves, group["moments"] = "bf16", with a seed,
                   group["moments_seed"]; None: as they say, and fp32 where they say nothing
    weights        where bf16 matrices rest: "resident", on the device; "streamed", where the CPU
                   updates them, in pinned host memory as half of their masters, which takes no more
                   of it. Then the device has a window of them: each is brought before a graph reads
                   it, in the forward and in the backward, and its place is used again. Vectors and
                   weights that are updated on the device stay there: "auto" of `gpu_states` counts
                   them with their states, k=0 keeps all others away. Native engine, AdamW or Adam,
                   one process, no updates before step() (`speculate`). "sharded", with several
                   ranks: each keeps its shard of them on its device, wherever the states are, and
                   all gather a unit before graphs read it. Native engine; every rank runs the same
                   graphs. "sharded_host": the same, and shards that the CPU updates rest on the
                   host, as half of their masters; AdamW or Adam, no updates before step(). "auto":
                   resident where all fit on the device beside a reserve of 40 % for activations,
                   else streamed where they can be; `explain` says which and why. Later streamed
                   where memory runs out all the same
    cpu_share      share of each batch that the CPU trains beside the device, in a loop over
                   `hytrain_fx.share(batch, model)`: a fraction below 1, 0 = none, "auto" = as many
                   sequences as shorten the step, measured while training, most often none. One
                   process, weights on the device, no updates before step() (`speculate`), no
                   `autocast_copies`, and no layer that normalises over the batch
    device         with `loader`: the device to train on, "cuda" or "cpu"
    loader         where a model on the meta device has its values from: `from_safetensors`,
                   `from_torch`, `from_init`, or a function of a name in state_dict(). Each tensor
                   goes to its place alone: bf16 matrices that are streamed to the host, others to
                   `device`
    process_group  ranks that train together, each on its own batches: gradients are averaged, each
                   rank updates its shard of every matrix and keeps that shard's states, and weights
                   and buffers begin as those of its first rank. None = the default group of
                   torch.distributed, where that has several ranks; False = this process trains on
                   its own
    pipeline       the schedule of torch.distributed.pipelining in which the model is a stage. Then
                   process_group=None means no ranks beside it: data parallel ones are given as a
                   group. Plans count with the time that the stage waits for others
    timeout_s      seconds after which a wait on a worker or a copy is an error; inf = never
    passes         list of graph passes to run instead of `hytrain_fx.DEFAULT_PASSES`, ours and your
                   own; None = the default ones
    dump           folder that receives each graph's text before and after each pass; one that
                   cannot be written any more is a warning
    dynamic        handed on to torch.compile
    options        Inductor options handed on to torch.compile; not together with mode
    mode           handed on to torch.compile; "reduce-overhead" is refused (CUDA graphs are not
                   shown to work)

    Numbers may be numpy's. `compile` also checks what only the model and the installed torch can
    tell.
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
    on_nonfinite: OnNonfinite = "allow"
    moments: Moments | None = None
    weights: Weights = "resident"
    cpu_share: CpuShare = 0
    device: Any = None
    loader: Any = None
    process_group: Any = None
    pipeline: Any = None
    timeout_s: float = 120.0
    passes: Sequence[Callable[..., Any]] | None = None
    dump: str | Path | None = None
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        _require(_is_auto(self.k) or _is_int(self.k, least=0), "k", self.k, '"auto" or an int >= 0')
        _require(self.plan is None or isinstance(self.plan, Plan), "plan", self.plan, "a hytrain_fx Plan or None")
        _require(self.plan is None or self.k == "auto", "plan", "a plan and k", "one of the two: a plan already fixes k")
        _require(_is_one_of(self.planner, get_args(Planner)), "planner", self.planner, f"one of {get_args(Planner)}")
        _require(_is_auto(self.stream) or _is_share(self.stream), "stream", self.stream, '"auto" or a number between 0 and 1')
        _require(_valid_gpu_states(self.gpu_states), "gpu_states", self.gpu_states,
                 '"auto", a float between 0 and 1 (fraction of the states), or an int >= 0 (bytes)')
        _require(_is_none_or_bytes(self.host_memory, least=1), "host_memory", self.host_memory, "None or a positive int (bytes)")
        _require(_is_auto(self.speculate) or isinstance(self.speculate, bool), "speculate", self.speculate, '"auto", True or False')
        _require(_is_none_or_bytes(self.shadow_memory, least=0), "shadow_memory", self.shadow_memory, "None or an int >= 0 (bytes)")
        _require(_is_int(self.replan_every, least=0), "replan_every", self.replan_every, "an int >= 0")
        _require(_is_int(self.warmup_steps, least=1), "warmup_steps", self.warmup_steps, "an int >= 1")
        _require(_is_one_of(self.engine, get_args(EngineName)), "engine", self.engine, f"one of {get_args(EngineName)}")
        _require(self.workers is None or (_is_int(self.workers, least=1) and self.workers <= MOST_WORKERS), "workers", self.workers,
                 f"None or an int from 1 to {MOST_WORKERS}")
        _require(isinstance(self.pin_workers, bool), "pin_workers", self.pin_workers, "True or False")
        _require(_is_none_or_bytes(self.ring_bytes, least=1), "ring_bytes", self.ring_bytes, "None or a positive int (bytes)")
        _require(isinstance(self.autocast_copies, bool), "autocast_copies", self.autocast_copies, "True or False")
        _require(_is_one_of(self.on_nonfinite, get_args(OnNonfinite)), "on_nonfinite", self.on_nonfinite, f"one of {get_args(OnNonfinite)}")
        _require(self.moments is None or _is_one_of(self.moments, get_args(Moments)), "moments", self.moments,
                 f"None or one of {get_args(Moments)}")
        _require(_is_one_of(self.weights, get_args(Weights)), "weights", self.weights, f"one of {get_args(Weights)}")
        _require(_is_auto(self.cpu_share) or (_is_share(self.cpu_share) and self.cpu_share != 1), "cpu_share", self.cpu_share,
                 '"auto" or a number from 0 to less than 1: the device keeps one sequence at least')
        if self.cpu_share != 0:
            self._check_shared()
        _require(self.loader is None or callable(self.loader) or hasattr(self.loader, "reading"), "loader", self.loader,
                 "None, hytrain_fx.from_safetensors(path), another source, or a function of a name")
        _require((self.loader is None) == (self.device is None), "device", self.device,
                 'the device to train on together with loader, and None without: a model with values is on its device')
        _require(not (self.on_host and self.speculate is True), "speculate", True,
                 f'False or "auto" with weights="{self.weights}": an update before step() would write weights that a backward may fetch')
        _require(not (self.fetches and self.engine in ("torch", "deepspeed")), "engine", self.engine,
                 f'"native" or "auto" with weights="{self.weights}": with others it is not there')
        _require(not (self.fetches and self.options and self.options.get("cpp_wrapper")), "options", "cpp_wrapper",
                 f'no C++ wrapper with weights="{self.weights}": only Python wrappers were seen to ask for memory at each launch')
        _require(not (self.shards and self.pipeline), "pipeline", "a schedule", f'None with weights="{self.weights}"')
        if self.on_host:
            object.__setattr__(self, "speculate", False)
        _require(_is_number(self.timeout_s) and self.timeout_s > 0, "timeout_s", self.timeout_s, "seconds > 0, or inf")
        object.__setattr__(self, "timeout_s", _seconds(self.timeout_s))
        _require(self.passes is None or isinstance(self.passes, list | tuple), "passes", self.passes,
                 "None, or a list of passes such as [*hytrain_fx.DEFAULT_PASSES, my_pass]")
        object.__setattr__(self, "passes", None if self.passes is None else tuple(self.passes))
        _require(self.dump is None or (isinstance(self.dump, str | Path) and str(self.dump) != ""), "dump", self.dump,
                 "None, or a folder as a str or a Path")
        _require(self.dynamic is None or isinstance(self.dynamic, bool), "dynamic", self.dynamic, "None, True or False")
        self._check_inductor()

    @property
    def streamed(self) -> bool:
        """Whether whole weights are to rest on the host."""
        return self.weights == "streamed"

    @property
    def shards(self) -> bool:
        """Whether ranks are to keep weights in shards."""
        return in_shards(self.weights)

    @property
    def on_host(self) -> bool:
        """Whether weights, or shards of them, are to rest on the host."""
        return rest_on_host(self.weights)

    @property
    def micro_batches(self) -> int:
        """How many backwards a step has, of the stage of a pipeline; 1 where that is not known."""
        return getattr(self.pipeline, "micro_batches", 1)

    @property
    def fetches(self) -> bool:
        """Whether graphs are to bring weights before they read them."""
        return self.streamed or self.shards

    def _check_shared(self) -> None:
        """What a batch may not be shared with.

        No update begins before all gradients are there, and every weight is whole, for the copy.
        """
        _require(self.weights == "resident", "weights", self.weights, '"resident" with cpu_share: weights elsewhere are not shared yet')
        _require(self.pipeline is None, "pipeline", "a schedule", "None with cpu_share")
        _require(self.speculate is not True, "speculate", True,
                 'False or "auto" with cpu_share: an update before step() would be without the CPU\'s gradients')
        object.__setattr__(self, "speculate", False)
        object.__setattr__(self, "autocast_copies", False)

    def _check_inductor(self) -> None:
        """Which names and values Inductor knows is asked of the installed torch, in `compile`."""
        options = {} if self.options is None else self.options
        _require(isinstance(options, Mapping) and all(isinstance(name, str) for name in options), "options", self.options,
                 "a dict of Inductor options by name")
        object.__setattr__(self, "options", dict(options))
        _require(self.mode is None or isinstance(self.mode, str), "mode", self.mode, "None or the name of a mode")
        _require(self.mode is None or not self.options, "mode", "a mode and options",
                 "one of the two: a mode stands for Inductor options")
        _require(self.mode not in ("reduce-overhead", "max-autotune"), "mode", self.mode,
                 'a mode without CUDA graphs: None, "default" or "max-autotune-no-cudagraphs"')

    @classmethod
    def from_options(cls, **options: Any) -> Config:
        """A Config from keyword options. Raises ConfigError for a name that is no option."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        return cls(**options)


@dataclass(frozen=True)
class DecidedConfig(Config):
    """Options of which `compile` has decided one, for this model and device.

    weights_choice   where weights="auto" has weights rest: `weights` has that place
    """

    weights_choice: WeightsChoice | None = None


_NUMBERS = ("k", "stream", "gpu_states", "host_memory", "shadow_memory", "replan_every", "warmup_steps", "workers", "ring_bytes",
            "timeout_s", "cpu_share")
_MOST_BYTES = 1 << 62  # what counts bytes in C holds more, and no machine has as much
MOST_WORKERS = 4096
"""More threads than any host has cores for: such a number is a slip."""


def in_shards(weights: Weights) -> bool:
    """Whether ranks keep weights in shards."""
    return weights in ("sharded", "sharded_host")


def rest_on_host(weights: Weights) -> bool:
    """Whether weights that the CPU updates, or shards of them, rest on the host."""
    return weights in ("streamed", "sharded_host")


def _require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"option {name}={found!r}: expected {expected}")


def _plain(value: Any) -> Any:
    """A number of another library (numpy's) as Python's own; anything else stays."""
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_one_of(value: object, names: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in names


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_none_or_bytes(value: object, least: int) -> bool:
    return value is None or (_is_int(value, least) and isinstance(value, int) and value <= _MOST_BYTES)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _valid_gpu_states(value: object) -> bool:
    return _is_auto(value) or (isinstance(value, float) and 0.0 <= value <= 1.0) or _is_int(value, least=0)


def _seconds(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int that no float holds
        return math.inf
