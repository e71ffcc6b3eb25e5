"""Step time of one way of training one model, in a process of its own.

    python -m benchmarks steps ours 3b --batch 4 --sequence 2048 --option k=0

A step is wall time over a window of consecutive steps without synchronisation, ended by a full drain; three windows.
Modes: `floor` (compiled forward and backward, no optimizer), `all_gpu` (fp32 masters and fused AdamW on the device),
`reference` (as all_gpu, with AdamW(foreach=True), whose bits are ours), `ours`.
"""

from __future__ import annotations

import argparse
import ast
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.llama import ADAMW, batches, build

Step = Callable[[torch.Tensor], torch.Tensor]
WINDOWS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks steps`."""
    parser.add_argument("mode", choices=("floor", "all_gpu", "reference", "ours"))
    parser.add_argument("size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--window", type=int, default=10, help="steps in one window")
    parser.add_argument("--warmup", type=int, default=12, help="steps before the first window")
    parser.add_argument("--clip", type=float, default=None, help="clip_grad_norm_ to this")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    parser.add_argument("--losses", type=int, default=0, help="print this many losses instead of timing")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of hytrain_fx.compile")
    parser.add_argument("--trace", default=None, help="write a Chrome trace of two steps here, and print the overlap")
    parser.add_argument("--explain", action="store_true", help="print hytrain_fx.explain at the end")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train as told; the result of the windows, or the losses."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if arguments.deterministic:
        torch.use_deterministic_algorithms(True)
    began = time.perf_counter()
    model = build(arguments.size, arguments.sequence, device, checkpointing=arguments.checkpointing)
    options = dict(_option(text) for text in arguments.option)
    step, finish = _trainer(arguments.mode, model, arguments.clip, options)
    tokens = batches(arguments.size, arguments.batch, arguments.sequence, device)
    result: dict[str, Any] = {"mode": arguments.mode, "size": arguments.size, "params": sum(p.numel() for p in model.parameters()),
                                  "tokens": arguments.batch * arguments.sequence, "clip": arguments.clip, "options": arguments.option}
    if arguments.losses:
        result["losses"] = torch.stack([step(next(tokens)) for _ in range(arguments.losses)]).tolist()
        finish()
        result["checksum"] = _checksum(model)
        return result
    step(next(tokens))
    finish()
    result["first_step_s"] = round(time.perf_counter() - began, 2)
    for _ in range(arguments.warmup):
        step(next(tokens))
    finish()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    windows = [_window_s(step, finish, tokens, arguments.window) for _ in range(WINDOWS)]
    result.update(step_s=round(statistics.median(windows), 4), windows_s=[round(w, 4) for w in windows], **_memory(device))
    if arguments.trace:
        from benchmarks.overlap import traced

        result["overlap"] = traced(model, lambda: step(next(tokens)), finish, arguments.trace)
    if arguments.mode == "ours":
        result.update(_ours(model, arguments.explain))
    return result


def _window_s(step: Step, finish: Callable[[], None], tokens: Any, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step(next(tokens))
    finish()
    return (time.perf_counter() - begin) / steps


def _trainer(mode: str, model: nn.Module, clip: float | None, options: dict[str, Any]) -> tuple[Step, Callable[[], None]]:
    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def backward(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss.detach()

    if mode == "ours":
        import hytrain_fx

        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), **options)

        def ours(tokens: torch.Tensor) -> torch.Tensor:
            loss = backward(tokens)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def finish() -> None:
            optimizer.session.drain()
            synchronize()

        return ours, finish
    model.compile()
    if mode == "floor":

        def floor(tokens: torch.Tensor) -> torch.Tensor:
            loss = backward(tokens)
            model.zero_grad(set_to_none=True)
            return loss

        return floor, synchronize
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    kernel: dict[str, Any] = {"fused": True} if mode == "all_gpu" else {"foreach": True}
    optimizer_on_gpu = torch.optim.AdamW(masters, **kernel, **ADAMW)

    def all_gpu(tokens: torch.Tensor) -> torch.Tensor:
        loss = backward(tokens)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer_on_gpu.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        optimizer_on_gpu.zero_grad(set_to_none=True)
        return loss

    return all_gpu, synchronize


def _ours(model: nn.Module, explain: bool) -> dict[str, Any]:
    from hytrain_fx.api import session_of

    session = session_of(model)
    if explain:
        import hytrain_fx

        print(hytrain_fx.explain(model))
    plan = session.planning.plan
    return {
        "k": plan.k,
        "units": len(session.units),
        "plan": plan.source,
        "predicted_step_s": round(plan.predicted.get("step_us", 0) / 1e6, 4),
        "engine": session.engine.name,
        "workers": session.engine.workers,
        "plan_s": round(session.planning.solve_us / 1e6, 2),
    }


def _memory(device: torch.device) -> dict[str, float]:
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {"peak_device_gb": round(peak, 2), "host_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)}


def _checksum(model: nn.Module) -> int:
    """Sum of all weights' bits as integers: equal weights, equal number."""
    total = 0
    for parameter in model.parameters():
        words = parameter.detach().contiguous().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        total = (total * 31 + int(words.long().sum())) % (1 << 61)
    return total


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def report(result: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(result), flush=True)
