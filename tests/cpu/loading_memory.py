"""What host memory `compile` takes of a model on the meta device: a process of its own.

    python -m tests.cpu.loading_memory safetensors FILE

Prints bytes: states that rest, the weights in them, which alone have pages by then, and the most
that the process had beyond what it had before.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of

LAYERS, WIDTH = 36, 1024
_PAGE_BYTES = 4096


def build(layers: int = LAYERS, width: int = WIDTH) -> nn.Module:
    """Layers of 2 MiB each in bf16."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(torch.bfloat16)


def resident_bytes() -> int:
    """What the process has in memory now, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


@contextmanager
def most_bytes() -> Iterator[list[int]]:
    """The most that was seen within, every 0.2 ms and at the end, is in the list afterwards."""
    seen, ended = [resident_bytes()], threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen[0] = max(seen[0], resident_bytes())
            time.sleep(2e-4)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        seen[0] = max(seen[0], resident_bytes())


def compiled(model: nn.Module, loader: Any) -> nn.Module:
    """Through `compile`, streamed."""
    optimizer = torch.optim.AdamW(model.parameters())
    return hytrain_fx.compile(model, optimizer, weights="streamed", device="cpu", loader=loader, workers=1)[0]


def main(how: str, file: str) -> None:
    """One model, after a small one has brought all code into memory."""
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    small = build(2, 64)
    save_file(small.state_dict(), file + ".small")
    with hytrain_fx.from_init() as init:
        first = build(2, 64)
    hytrain_fx.close(compiled(first, init))
    with hytrain_fx.on_meta():
        second = build(2, 64)
    hytrain_fx.close(compiled(second, hytrain_fx.from_safetensors(file + ".small")))
    before = resident_bytes()
    with most_bytes() as seen:
        loader: Any
        if how == "init":
            with hytrain_fx.from_init(kept_bytes=8 << 20) as loader:
                model = build()
        else:
            with hytrain_fx.on_meta():
                model = build()
            if how == "whole":
                loader = load_file(file).__getitem__
            else:
                loader = hytrain_fx.from_torch(file) if how == "torch" else hytrain_fx.from_safetensors(file)
        model = compiled(model, loader)
    session = session_of(model)
    slots = sum(states.slot.nbytes for _, states in session.states if states.slot is not None)
    rests = sum(slab.nbytes for slab in session.states.slabs) - slots
    weights = sum(p.numel() * p.element_size() for p in session.table.parameters)
    print(json.dumps({"rests": rests, "weights": weights, "most": seen[0] - before, "after": resident_bytes() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
