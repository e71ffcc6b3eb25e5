"""Accelerate: `prepare` with the optimizer offloaded. The loop stays as it is.

    from hytrain_fx.integrations.accelerate import prepare

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

With several processes (`accelerate launch`, torchrun) hytrain_fx averages their gradients, and the
model is not wrapped in DistributedDataParallel.

Nothing of Accelerate's is imported: the accelerator is handed over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError


def prepare(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any, **options: Any) -> tuple[Any, ...]:
    """Compile `model` and `optimizer`, and give all objects as `accelerator.prepare` has them.

    `others` are loaders and schedulers; a scheduler may have been made on the given optimizer.
    `options` are those of `hytrain_fx.compile`.

    A checkpoint is loaded after it. Raises UnsupportedError where Accelerate would wrap, convert or
    compile the model its own way, and what `hytrain_fx.compile` raises.
    """
    require_plain(accelerator)
    if accelerator.device_placement and isinstance(model, nn.Module):
        model.to(accelerator.device)  # compile() numbers what is on the device
    model, offloaded = hytrain_fx.compile(model, optimizer, **options)
    if accelerator.num_processes > 1:
        model = prepare_unwrapped(accelerator, model)
    prepared: tuple[Any, ...] = accelerator.prepare(model, offloaded, *others)
    return prepared


def prepare_unwrapped(accelerator: Any, model: nn.Module) -> nn.Module:
    """As `accelerator.prepare_model`, without DistributedDataParallel around it.

    Accelerate wraps no model for evaluations, and none that it has prepared before.
    """
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    prepared._is_accelerate_prepared = True  # type: ignore[assignment]
    return prepared


def require_plain(accelerator: Any) -> None:
    """Raise UnsupportedError where `accelerator.prepare` would make another model of the given one.

    It shards one, replaces layers for fp8, and compiles. A torch.compile with
    its defaults, around the whole model, leaves our graphs inside, so it is let through.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise UnsupportedError(
            f"the accelerator is a {type(accelerator).__name__}; expected accelerate's Accelerator, then the model and its optimizer"
        )
    found = accelerator.distributed_type.value
    if found == "DEEPSPEED":
        raise UnsupportedError(
            "Accelerate is set up for DEEPSPEED; expected no DeepSpeed: hytrain_fx offloads the optimizer itself. Leave deepspeed= out of "
            "the TrainingArguments, or the plugin out of the Accelerator, and start the script without `accelerate launch`"
        )
    if found not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UnsupportedError(
            f"Accelerate is set up for {found}; expected processes with one device each, CPU or GPU. Start the script without a plugin "
            "for several devices"
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError('Accelerate\'s mixed_precision is fp8, which replaces layers; expected "no", "bf16" or "fp16"')
    _require_no_other_compilation(accelerator.state.dynamo_plugin)


def _require_no_other_compilation(dynamo: Any) -> None:
    regional = getattr(dynamo, "use_regional_compilation", False)
    asked = {"backend": dynamo.backend.value.lower(), "mode": dynamo.mode, "regional": regional}
    if asked["backend"] not in ("no", "inductor") or (asked["backend"] == "inductor" and (asked["mode"] != "default" or regional)):
        raise UnsupportedError(
            f"Accelerate is set up to compile the model with {asked}; expected nothing of it: hytrain_fx compiles the model. Leave "
            "torch_compile_backend and torch_compile_mode out of the TrainingArguments, dynamo_backend and dynamo_plugin out of the "
            "Accelerator. `mode` and Inductor's `options` are options of hytrain_fx.compile"
        )
