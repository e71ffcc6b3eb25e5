"""The tools that a user would otherwise take, each set up as its own documentation says.

Each is imported only when it is asked for.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.case import CannotRun, Case, require
from benchmarks.models import Batch, blocks, loss_of, trained
from benchmarks.trainer import backward_of, precision
from hytrain_fx.forecast.bench.loops import ADAMW, Trainer, synchronize

ONE_PROCESS = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def zero_offload(case: Case, model: nn.Module, device: torch.device, stage: int = 2, weights_too: bool = False) -> Trainer[Batch]:
    """DeepSpeed ZeRO with the optimizer on the CPU, bf16 parameters, compiled.

    One process, or one of those that torchrun has started.
    """
    _be_a_rank()
    deepspeed = require("deepspeed", "deepspeed", f"mode {case.mode}")
    if device.type != "cuda":
        raise CannotRun(f"mode {case.mode} needs a CUDA device: without one DeepSpeed trains on the CPU, with nothing to offload")
    config = zero_offload_config(case, stage, weights_too)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=config)
    engine.compile()

    def step(batch: Batch) -> torch.Tensor:
        for _ in range(case.micro_batches):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return Trainer(step, synchronize, lambda: {"package": f"deepspeed {deepspeed.__version__}"})


def _be_a_rank() -> None:
    """The only one, where torchrun has not said another."""
    for name, value in (ONE_PROCESS | {"MASTER_PORT": str(_free_port())}).items():
        os.environ.setdefault(name, value)


def _free_port() -> int:
    """Another row may be running beside this one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def zero_offload_config(case: Case, stage: int = 2, weights_too: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration, the same on each GPU. With stage 3 weights are sharded, too.

    weights_too   they are on the CPU as well
    """
    adamw = {name: list(value) if isinstance(value, tuple) else value for name, value in ADAMW.items()}
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            **({"offload_param": {"device": "cpu", "pin_memory": True}} if weights_too else {}),
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
    optim = require("torchao", "torchao.optim", f"mode {case.mode}")
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

    return Trainer(step, synchronize, lambda: {"package": f"torchao {version('torchao')}"})


def fsdp2(case: Case, model: nn.Module, device: torch.device, offload: bool) -> Trainer[Batch]:
    """FSDP2 with each block compiled and a unit of its own; fp32 parameters, bf16 compute.

    One process, or one of those that torchrun has started.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not torch.distributed.is_initialized():
        _be_a_rank()
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks(case.size, model):
        block.compile()
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    backward = backward_of(replace(case, mode="floor", autocast=False), model, device)  # its policy casts

    def step(batch: Batch) -> torch.Tensor:
        loss = backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step, synchronize)
