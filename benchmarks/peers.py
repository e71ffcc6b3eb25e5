"""The tools that a user would otherwise take, each set up as its own documentation says.

Each is imported only when it is asked for.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import nn

from benchmarks.case import CannotRun, Case
from benchmarks.models import Batch, blocks, loss_of, trained
from benchmarks.trainer import precision, require
from hytrain_fx.forecast.bench.loops import ADAMW, Trainer, synchronize

ONE_PROCESS = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def zero_offload(case: Case, model: nn.Module, device: torch.device, stage: int = 2) -> Trainer[Batch]:
    """DeepSpeed ZeRO with the optimizer on the CPU, bf16 parameters, compiled.

    One process, or one of those that torchrun has started.
    """
    for name, value in (ONE_PROCESS | {"MASTER_PORT": str(_free_port())}).items():
        os.environ.setdefault(name, value)
    deepspeed = require("deepspeed", "deepspeed", case.mode)
    if device.type != "cuda":
        raise CannotRun("mode zero_offload needs a CUDA device: without one DeepSpeed trains on the CPU, with nothing to offload")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=zero_offload_config(case, stage))
    engine.compile()

    def step(batch: Batch) -> torch.Tensor:
        for _ in range(case.micro_batches):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return Trainer(step, synchronize, lambda: {"package": f"deepspeed {deepspeed.__version__}"})


def _free_port() -> int:
    """Another row may be running beside this one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def zero_offload_config(case: Case, stage: int = 2) -> dict[str, Any]:
    """DeepSpeed's configuration, the same on each GPU. With stage 3 weights are sharded, too."""
    adamw = {name: list(value) if isinstance(value, tuple) else value for name, value in ADAMW.items()}
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def torchao(case: Case, model: nn.Module, device: torch.device) -> Trainer[Batch]:
    """torchao's CPUOffloadOptimizer, with gradients offloaded too and each block compiled.

    That is its fastest form on the measured H200.
    """
    if case.micro_batches != 1:
        raise CannotRun("torchao's CPUOffloadOptimizer with offloaded gradients does not accumulate; leave --micro-batches out")
    optim = require("torchao", "torchao.optim", case.mode)
    if device.type != "cuda":
        raise CannotRun("mode torchao needs a CUDA device: its optimizer copies on CUDA streams")
    for block in blocks(case.size, model):
        block.compile()
    optimizer = optim.CPUOffloadOptimizer(trained(model), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAMW)

    def step(batch: Batch) -> torch.Tensor:
        with precision(case, device):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, synchronize, lambda: {"package": f"torchao {require('torchao', 'torchao', case.mode).__version__}"})
