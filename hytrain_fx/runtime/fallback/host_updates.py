"""What the torch engine's worker runs on one part of a row.

The op-by-op AdamW, or DeepSpeedCPUAdam.

DeepSpeed knows no per-step scalars, only hyper-parameters. With its bias correction off, these give
the same formula:

    lr'  = -neg_step_size * bias2_sqrt       lr / (1 - beta1^t) * sqrt(1 - beta2^t)
    eps' = eps * bias2_sqrt                  (sqrt(v) / b + eps = (sqrt(v) + eps * b) / b)
    weight_decay' = (1 - decay) / lr'        AdamW; Adam's l2 stays as it is
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from hytrain_fx.errors import ConfigError, EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.ir.states import ADAMW_DEFAULT, Kernel
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.scalars import UpdateFlag, UpdateScalars


class HostUpdate(Protocol):
    """Updates states on the host in place.

    The slot holds the gradient, which stays, and `out` receives a new 16-bit weight.
    """

    name: str
    grain_params: int  # parameters in one call: temporaries are of this size

    def require_supported(self, row: int, states: RowStates) -> None: ...
    def __call__(self, states: RowStates, scalars: UpdateScalars) -> None: ...


class OpByOp:
    """The bits of the native engine, at about a thirtieth of its speed.

    36 against 1.1 ns a bf16 parameter on one core.
    """

    name = "torch"

    def __init__(self) -> None:
        # 32 K a thread: torch runs less than that on one thread, and with more the fp64 temporaries
        # leave the cache (256 K: 49 ns).
        self.grain_params = (32 << 10) * torch.get_num_threads()

    def require_supported(self, row: int, states: RowStates) -> None:
        """Every row is."""

    def __call__(self, states: RowStates, scalars: UpdateScalars) -> None:
        states.update_(scalars, _slot(states), states.out)


class DeepSpeedAdam:
    """deepspeed.ops.adam.DeepSpeedCPUAdam on the host's states.

    It contracts other multiply-adds than `OpByOp`. Seen with deepspeed 0.19.8 over 100 steps of
    0.01: weights of order 1 differ by at most 7e-7, exp_avg by 3e-7, exp_avg_sq by a relative 9e-7.
    Raises ConfigError where deepspeed is missing, EngineError where its cpu_adam op cannot be built
    or has been locked by a build that is no more.
    """

    name = "deepspeed"
    grain_params = CHUNK_PARAMS

    def __init__(self) -> None:
        self._placeholder = torch.nn.Parameter(_empty(1).zero_())
        self._by_mode = {decoupled: self._optimizer(decoupled) for decoupled in (True, False)}
        self._staging = _empty(0)

    def require_supported(self, row: int, states: RowStates) -> None:
        """Raises EngineError for amsgrad, states in bf16, and other kernels' rows."""
        if states.table == ADAMW_DEFAULT or states.table.kernel is Kernel.NONE:
            return
        what = states.table.optimizer
        if states.table.kernel is Kernel.ADAMW:
            what = "moments in bf16" if any(state.dtype == "bfloat16" for state in states.table.states) else "amsgrad"
        raise EngineError(f"row {row}: DeepSpeedCPUAdam has no {what}; leave that out, or use engine='native' or 'torch'")

    def __call__(self, states: RowStates, scalars: UpdateScalars) -> None:
        assert isinstance(scalars, AdamScalars)  # require_supported
        optimizer = self._by_mode[not scalars.flags & UpdateFlag.L2]
        master = torch.nn.Parameter(states.master, requires_grad=False)
        master.grad = self._gradient(_slot(states), scalars)
        step_size = -scalars.neg_step_size * scalars.bias2_sqrt
        decay = scalars.l2 if scalars.flags & UpdateFlag.L2 else (1.0 - scalars.decay) / step_size if step_size else 0.0
        beta1 = -scalars.lerp if scalars.flags & UpdateFlag.LERP_FROM_END else 1.0 - scalars.lerp
        group = optimizer.param_groups[0]
        group.update(params=[master], lr=step_size, betas=(beta1, scalars.beta2), eps=scalars.eps * scalars.bias2_sqrt, weight_decay=decay)
        optimizer.state.clear()
        optimizer.state[master] = {"step": 0, **states.named()}
        try:
            optimizer.step()
        finally:
            optimizer.state.clear()
            group["params"] = [self._placeholder]
        if states.out is not None:
            states.out.copy_(states.master)

    def _gradient(self, slot: torch.Tensor, scalars: UpdateScalars) -> torch.Tensor:
        """The gradient in fp32 with its factors, each product rounded to the gradient's dtype."""
        if self._staging.numel() < slot.numel():
            self._staging = _empty(slot.numel())
        staged = self._staging[: slot.numel()].copy_(slot)
        for factor in scalars.factors:
            staged.mul_(factor)
            if slot.dtype != torch.float32:
                staged.copy_(staged.to(slot.dtype))
        return staged.neg_() if scalars.flags & UpdateFlag.MAXIMIZE else staged

    def _optimizer(self, decoupled: bool) -> Any:
        try:
            make = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        except ImportError as error:
            raise ConfigError(
                f"engine='deepspeed' needs deepspeed, which does not import: {error}. "
                "Install it: pip install hytrain-fx[deepspeed]; or use engine='native' or 'torch'"
            ) from error
        wait_for_build("cpu_adam")
        try:
            return make([self._placeholder], bias_correction=False, adamw_mode=decoupled)
        except Exception as error:  # a failed build comes as any of several types
            raise EngineError(
                f"DeepSpeedCPUAdam cannot be had: {error} ({error.__cause__}). Its cpu_adam op is built at first use, which needs "
                "a C++ compiler and ninja on PATH; or use engine='native' or 'torch'"
            ) from error


def host_update(adam: str) -> HostUpdate:
    """DeepSpeedAdam for "deepspeed", else OpByOp. Raises what DeepSpeedAdam does."""
    return DeepSpeedAdam() if adam == "deepspeed" else OpByOp()


def _empty(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")  # whatever the defaults are


def _slot(states: RowStates) -> torch.Tensor:
    if states.slot is None:
        raise EngineError("internal: states without a slot are not on the host")
    return states.slot


# ---- The lock of an extension that torch.utils.cpp_extension builds at first use ----
#
# The building process makes a file named `lock` and takes it away at the end; every other one waits
# until it is gone. A build that was killed leaves the file, and torch then waits for it without end
# and without a word.


STILL_S = 600.0  # nothing is written for minutes while one source compiles on a busy machine
_POLL_S = 0.2


def wait_for_build(extension: str) -> None:
    """Returns when no other process builds `extension`.

    Raises EngineError naming the lock where nothing in the build's folder has changed for STILL_S
    seconds.
    """
    folder = _build_folder(extension)
    lock = folder / "lock"
    while lock.exists():
        unchanged_s = time.time() - _last_change_s(folder)
        if unchanged_s > STILL_S:
            raise EngineError(
                f"{lock} says that another process builds {extension}, but nothing there has changed for {unchanged_s:.0f} s: "
                "a build that was killed leaves it behind. Remove that file if no build runs, or use engine='native' or 'torch'"
            )
        time.sleep(_POLL_S)


def _build_folder(extension: str) -> Path:
    """Where torch.utils.cpp_extension builds it."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"]) / extension
    from torch.utils.cpp_extension import get_default_build_root  # not above: half a second, for those who need it only

    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    built_for = next((name + version.replace(".", "") for name, version in versions.items() if version is not None), "cpu")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{built_for}" / extension


def _last_change_s(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # the build goes on, and took it away
            return time.time()
    return max(times)
