"""What one row of a result measures: a way of training, a model, a batch.

The same value is given as command line, key and JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

OWN_MODES = ("floor", "all_gpu", "reference", "ours")
PEER_MODES = ("zero_offload", "torchao", "zero_infinity", "fsdp2_offload")
MODES = OWN_MODES + PEER_MODES
TITLES = {"floor": "forward and backward alone", "all_gpu": "PyTorch, all on the GPU", "reference": "PyTorch, all on the GPU, foreach",
          "ours": "hytrain_fx", "zero_offload": "DeepSpeed ZeRO-Offload", "torchao": "torchao CPU offload",
          "zero_infinity": "DeepSpeed ZeRO-Infinity, all on the CPU", "fsdp2_offload": "FSDP2, all on the CPU"}
_DEEPSPEED = ("zero_offload", "zero_infinity")
_FP32_ONLY = ("torchao", "fsdp2_offload")  # their optimizers keep no masters beside 16-bit parameters


NEVER_REACHED = 1e9  # by a norm
_ADDED_LATER = ("device_memory_gb", "host_memory_gb")  # result files of before have no such field


class CannotRun(Exception):
    """A row that this machine, or what is installed on it, cannot measure.

    The message says what to do.
    """


def require(package: str, module: str, who: str) -> Any:
    """A module of a package that only `who` (a mode, the models) needs.

    Raises CannotRun, with all that is known of why, where it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = f"{error}: {error.__cause__!r}" if error.__cause__ else f"{error}"
        raise CannotRun(f"{who} needs {package}, which cannot be imported here ({found}): pip install {package}") from error


@dataclass(frozen=True)
class Case:
    """One row.

    mode        one of MODES
    size        a name of `llama.SHAPES`, `wN` or `hHlN` of the families there, or a family
                of the zoo (`families`)
    batch       sequences, or other samples, in one step
    sequence    tokens in one sequence, or what is long about another sample
    clip        clip the global gradient norm to this, None = no clipping
    autocast    fp32 parameters under bf16 autocast, not bf16 parameters with fp32 masters
    options     `NAME=VALUE` options of `hytrain_fx.compile`
    micro_batches   backwards in one step, each over `batch` sequences
    scaled_every    with `clip`: one step in this many is clipped to it, others to NEVER_REACHED, so
                    that their factor is 1
    device_memory_gb    torch's allocator gets no more of the GPU than this, in 10^9 bytes; None =
                        all of it. The CUDA context is not part of it
    host_memory_gb      the row's processes hold no more of the host than this, in 10^9 bytes
                        (`host_watch`); ours may put HOST_SHARE of it into states
    """

    mode: str
    size: str
    batch: int = 4
    sequence: int = 2048
    clip: float | None = None
    autocast: bool = False
    checkpointing: bool = False
    options: tuple[str, ...] = ()
    micro_batches: int = 1
    scaled_every: int = 1
    device_memory_gb: float | None = None
    host_memory_gb: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise CannotRun(f"found mode {self.mode!r}, expected one of {', '.join(MODES)}")
        if self.mode in _DEEPSPEED and self.autocast:
            raise CannotRun(f"{self.mode} trains bf16 parameters with fp32 masters; leave --autocast out")
        if self.mode in _FP32_ONLY and not self.autocast:
            object.__setattr__(self, "autocast", True)
        if self.mode == "torchao" and self.clip is not None:
            raise CannotRun("torchao's CPUOffloadOptimizer updates before the norm of all gradients is known; leave --clip out")
        if min(self.micro_batches, self.scaled_every) < 1:
            raise CannotRun(f"found {self.micro_batches} micro-batches, one step in {self.scaled_every} scaled; expected at least 1")
        if self.scaled_every != 1 and (self.clip is None or self.mode in _DEEPSPEED):
            raise CannotRun("--scaled-every is for --clip in a loop that calls clip_grad_norm_")
        if not all(gb is None or gb > 0 for gb in (self.device_memory_gb, self.host_memory_gb)):
            raise CannotRun(f"found caps of {self.device_memory_gb} and {self.host_memory_gb} GB, expected more than 0")
        if self.options and self.mode != "ours":
            raise CannotRun(f"--option is for ours, mode {self.mode} has none; found {', '.join(self.options)}")

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.sequence * self.micro_batches

    @property
    def key(self) -> str:
        """This case in one line; different cases have different keys."""
        return " ".join([self.mode, self.workload, *self.options])

    @property
    def label(self) -> str:
        """Mode, clipping, precision and options: what sets rows of one model and batch apart."""
        words = [self.mode, *([self._clip_text] if self.clip is not None else []), *(["autocast"] if self.autocast else [])]
        words += [f"accumulated={self.micro_batches}"] if self.micro_batches != 1 else []
        return " ".join([*words, *self.options, *self._caps])

    @property
    def title(self) -> str:
        """What a legend calls it: mode, options, precision where a peer's is its own."""
        options = f" ({', '.join(self.options)})" if self.options else ""
        return TITLES[self.mode] + options + (", fp32 parameters" if self.autocast and self.mode in PEER_MODES else "")

    @property
    def workload(self) -> str:
        """Model, batch, precision and clipping: rows that agree in it did the same training."""
        words = [self.size, f"{self.batch}x{self.sequence}"]
        words += [self._clip_text] if self.clip is not None else []
        words += ["autocast"] if self.autocast else []
        words += [f"accumulated={self.micro_batches}"] if self.micro_batches != 1 else []
        return " ".join(words + (["checkpointing"] if self.checkpointing else []) + self._caps)

    @property
    def _caps(self) -> list[str]:
        caps = {"device": self.device_memory_gb, "host": self.host_memory_gb}
        return [f"{name}<={gb:g}GB" for name, gb in caps.items() if gb is not None]

    @property
    def _clip_text(self) -> str:
        return f"clip={self.clip:g}" + (f" in one of {self.scaled_every}" if self.scaled_every != 1 else "")

    @property
    def arguments(self) -> list[str]:
        """Arguments of `python -m benchmarks steps` that run it."""
        words = [self.mode, self.size, "--batch", str(self.batch), "--sequence", str(self.sequence)]
        words += ["--clip", str(self.clip)] if self.clip is not None else []
        words += ["--scaled-every", str(self.scaled_every)] if self.scaled_every != 1 else []
        words += ["--autocast"] if self.autocast else []
        words += ["--micro-batches", str(self.micro_batches)] if self.micro_batches != 1 else []
        words += ["--checkpointing"] if self.checkpointing else []
        words += ["--device-memory", str(self.device_memory_gb)] if self.device_memory_gb is not None else []
        words += ["--host-memory", str(self.host_memory_gb)] if self.host_memory_gb is not None else []
        return words + [word for option in self.options for word in ("--option", option)]

    def values(self) -> dict[str, Any]:
        """The fields, and the tokens of a step, as JSON has them."""
        return {**asdict(self), "options": list(self.options), "tokens": self.tokens}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Case:
        """The case that a row of a result file names. Raises CannotRun for anything else."""
        try:
            values: dict[str, Any] = {field.name: row.get(field.name) if field.name in _ADDED_LATER else row[field.name]
                                      for field in fields(cls)}
        except KeyError as error:
            raise CannotRun(f"found a row without {error}; this is not a result file of this version") from error
        return cls(**{**values, "options": tuple(values["options"])})


def unique(cases: Sequence[Case]) -> list[Case]:
    """The cases in their order, each once."""
    return list(dict.fromkeys(cases))
