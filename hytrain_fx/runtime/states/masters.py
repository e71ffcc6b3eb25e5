"""Fp32 masters from the weights of a model, at the speed of the link.

A blocking `copy_` of a 16-bit weight on a GPU to an fp32 tensor on the host goes by a fresh unpinned tensor of the weight's size, then is
converted by the CPU. An asynchronous one is converted on the GPU and goes straight to pinned memory; by chunks, the GPU needs one
chunk of memory for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hytrain_fx.runtime.engine import CHUNK_PARAMS


def load_masters(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write each weight into its master, both flat, on any devices; a master that is its weight's own memory is left alone.

    pairs    (master [n] fp32, weight [n] fp32, bf16 or fp16)

    Returns when all are written.
    """
    devices: set[torch.device] = set()
    for master, weight in pairs:
        if master.data_ptr() == weight.data_ptr():
            continue
        for to, source in zip(master.split(CHUNK_PARAMS), weight.split(CHUNK_PARAMS), strict=True):
            to.copy_(source, non_blocking=True)
        devices |= {one.device for one in (master, weight) if one.device.type == "cuda"}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
