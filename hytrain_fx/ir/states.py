"""What each native update keeps of a parameter.

One table that memory, estimates, checkpoints, kernels and the cost model read.

    ADAMW.under({"amsgrad": False})     the states that rows of a group with these options have

Beside its states a row has an fp32 master, which of an fp32 weight is that weight. States may rest
wherever `Placement` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.ir.limits import FP32_BYTES, HALF_BYTES, MAX_STATES

_ITEM_BYTES = {"float32": FP32_BYTES, "bfloat16": HALF_BYTES}  # what kernels take

MOMENTS: Final = "moments"
"""The option of a parameter group that says in what its states rest: "fp32", or "bf16", rounded
by chance (runtime/rounding.py)."""
MOMENTS_SEED: Final = "moments_seed"
"""The option with the seed of that, an int; 0 where there is none."""


class Kernel(IntEnum):
    """The update of a row; mirrors Kernel in csrc/update_scalars.h.

    NONE: another optimizer's own step, of whole tensors.
    """

    NONE = -1
    ADAMW = 0
    LION = 1


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state: as many elements as the parameter has.

    name        its key in the optimizer's entry, and so in checkpoints
    dtype       of each element
    option      the option of a group with which it is kept; None: always
    marks_ties  no element is negative, and the signs that are free so are part of a master in two
                halves (split_master.py)
    """

    name: str
    dtype: str = "float32"
    option: str | None = None
    marks_ties: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]


def moments_of(options: Mapping[str, object]) -> str | None:
    """The dtype in which a group of these options has its states; None for fp32.

    Raises UnsupportedError for a value that is none of `MOMENTS`.
    """
    asked = options.get(MOMENTS, "fp32")
    if asked not in ("fp32", "bf16"):
        raise UnsupportedError(f"{MOMENTS} of a parameter group is {asked!r}: expected \"fp32\" or \"bf16\"")
    return "bfloat16" if asked == "bf16" else None


@dataclass(frozen=True, slots=True)
class StateTable:
    """The states of one parameter, in the order in which kernels take them.

    optimizer   whose they are, for messages
    states      at most `limits.MAX_STATES`; those that an option may leave out come last, as
                kernels take the others by their place
    own_bytes   what another optimizer's step makes and keeps, besides the master, instead of
                `states`

    Raises ConfigError for a table that kernels could not take.
    """

    kernel: Kernel
    optimizer: str
    states: tuple[StateSpec, ...] = ()
    own_bytes: int = 0

    def __post_init__(self) -> None:
        optional = [state.option is not None for state in self.states]
        if len(self.states) > MAX_STATES or optional != sorted(optional):
            raise ConfigError(f"{self.optimizer} has the states {self.names}; expected at most {MAX_STATES}, those with an option last")

    def under(self, options: Mapping[str, object]) -> StateTable:
        """The states that a group of these options keeps, in the dtype that it asks for.

        Raises UnsupportedError for options that do not go together.
        """
        kept = tuple(state for state in self.states if state.option is None or options.get(state.option))
        narrow = moments_of(options)
        if narrow is None or self.kernel is Kernel.NONE:
            return replace(self, states=kept)
        optional = next((state for state in kept if state.option is not None), None)
        if optional is not None:
            raise UnsupportedError(f"{optional.option}=True with {MOMENTS}=\"bf16\": {optional.name} is the largest value so far, and one "
                                   f"that is rounded up now and then would grow by itself. Leave one of the two out")
        return replace(self, states=tuple(replace(state, dtype=narrow) for state in kept))

    def is_part_of(self, other: StateTable) -> bool:
        """Whether the other one has each of these states, in the same dtype."""
        return all(state in other.states for state in self.states)

    def with_own(self, nbytes: int) -> StateTable:
        """The same with so many bytes in `own_bytes`."""
        return replace(self, own_bytes=nbytes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the states."""
        return tuple(state.name for state in self.states)

    @property
    def tie(self) -> int | None:
        """Which state's signs are part of a master in two halves.

        None: masters are whole, wherever they rest.
        """
        return next((number for number, state in enumerate(self.states) if state.marks_ties), None)

    @property
    def tensors(self) -> int:
        """Master and states."""
        return 1 + len(self.states)

    @property
    def bytes_per_param(self) -> int:
        """Master and states, without `own_bytes`."""
        return FP32_BYTES + sum(state.itemsize for state in self.states)


ADAMW: Final = StateTable(Kernel.ADAMW, "Adam", (
    StateSpec("exp_avg"),
    StateSpec("exp_avg_sq", marks_ties=True),
    StateSpec("max_exp_avg_sq", option="amsgrad"),
))
"""Of torch.optim.AdamW and Adam."""

LION: Final = StateTable(Kernel.LION, "Lion", (StateSpec("exp_avg"),))
"""Of hytrain_fx.Lion. Its state has either sign, so masters stay whole."""

MASTER_ALONE: Final = StateTable(Kernel.NONE, "another optimizer")
"""Of optimizers whose own step updates whole tensors."""

ADAMW_DEFAULT: Final = ADAMW.under({})
STATE_BYTES_PER_PARAM: Final = ADAMW_DEFAULT.bytes_per_param
"""Where nothing is said of the optimizer."""


@dataclass(frozen=True, slots=True)
class StateTraffic:
    """What updates of one unit move of master and states.

    bytes_per_param    master and states, of all its parameters on average
    halves             whether the master of a 16-bit weight is in two halves on the host, one of
                       which is the weight
    """

    bytes_per_param: float = STATE_BYTES_PER_PARAM
    halves: bool = True

    def streamed_bytes(self, params: int, grad_bytes: int) -> int:
        """Bytes of states that cross the link each way when so many parameters are streamed.

        The half of a master that is the weight stays on the device.
        """
        return round(self.bytes_per_param * params) - (grad_bytes if self.halves and self._narrow(params, grad_bytes) else 0)

    def updated_bytes(self, params: int, grad_bytes: int) -> int:
        """Bytes of host memory that an update by the CPU touches.

        Gradients are read, states read and written, weights apart from their masters written.
        """
        apart = grad_bytes if not self.halves and self._narrow(params, grad_bytes) else 0
        return round(2 * self.bytes_per_param * params) + grad_bytes + apart

    def device_bytes(self, params: int) -> int:
        """Bytes of device memory in an update of 16-bit parameters on the device."""
        return round((2 * self.bytes_per_param + 2 * HALF_BYTES) * params)

    @staticmethod
    def _narrow(params: int, grad_bytes: int) -> bool:
        return grad_bytes < FP32_BYTES * params


ADAMW_TRAFFIC: Final = StateTraffic()
UPDATE_BYTES_PER_PARAM: Final = ADAMW_TRAFFIC.device_bytes(1)
