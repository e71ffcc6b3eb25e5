"""Rates of the AdamW kernels beside torch's fused ones, as JSON.

    python benchmarks/kernels.py [--parameters N] [--threads 1,2,4] [--repeats R]

CPU: the C++ kernel (bf16 gradient in, bf16 weight out, fp32 states: 28 bytes of DRAM traffic a
parameter) and torch._fused_adamw_ (fp32 gradient in, no 16-bit weight: also 28 bytes), by threads,
from DRAM and, one thread, from a chunk of 64 Ki parameters in L2. GPU, where there is one: the CUDA
kernel and torch._fused_adamw_. Ours with moments in fp32 and in bf16, which move 20 bytes. Rates
are of the fastest repeat; GB/s counts these bytes.

On the CPU also of values with denormals, with which x86 computes slowly: what a row of an embedding
has that no batch uses any more, and vanished gradients.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch

from hytrain_fx.ir.states import ADAMW, StateTraffic
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import CommitItem, RowSpec, RowStates
from hytrain_fx.runtime.native import libraries
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.native.structs import c_states

GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CHUNK_IN_L2 = 1 << 16
RING_BYTES, TIMEOUT_S = 1 << 20, 60.0


@dataclass(frozen=True)
class Values:
    """Of every parameter."""

    name: str
    grad: float = 0.01
    m: float = 0.01
    v: float = 0.02


USUAL = Values("usual")
# Zero gradients leave a first moment of 4 * 2^-149: 0.9 of it rounds to as much.
UNUSED = Values("of a row that is not used", 0.0, 4 * 2.0**-149, 1e-12)
VANISHED = Values("of vanished gradients", 1e-20, 1e-20, 1e-40)


@dataclass(frozen=True)
class Rate:
    kernel: str
    device: str
    threads: int
    parameters: int
    parameters_per_s: float
    gb_per_s: float
    values: str = USUAL.name


def measure(
    kernel: str, device: str, threads: int, parameters: int, repeats: int, calls: int, step: Callable[[], object], moments: str = "fp32",
    values: Values = USUAL,
) -> Rate:
    """Rate of `step`, which updates `parameters` parameters `calls` times, then returns.

    Its first run is not counted.
    """
    step()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    rate = parameters * calls / min(seconds)
    moved_bytes = StateTraffic(ADAMW.under({"moments": moments}).bytes_per_param).device_bytes(1)
    return Rate(kernel, device, threads, parameters, rate, rate * moved_bytes / 1e9, values.name)


def states(parameters: int, device: str, moments: str = "fp32", values: Values = USUAL) -> RowStates:
    """Master [parameters] fp32, and both moments as a group's option `moments` has them."""
    table = ADAMW.under({"moments": moments})
    master, *of_table = (torch.full((parameters,), value, device=device) for value in (1.0, values.m, values.v))
    return RowStates(table, master, tuple(state.to(getattr(torch, of.dtype)) for state, of in zip(of_table, table.states, strict=True)))


def update_of(parameters: int, calls: int = 1, moments: str = "fp32", values: Values = USUAL) -> Callable[[], None]:
    """What updates this many parameters of its own `calls` times, on the thread that calls it.

    With the C++ kernel.
    """
    function = libraries.library(libraries.KERNEL_SOURCES).load().hytrain_fx_update_chunk
    struct = AdamScalars.of({**GROUP, "moments": moments}, 10, decoupled=True, torch_cuda=False).c_struct
    grads, of = torch.full((parameters,), values.grad, dtype=torch.bfloat16), states(parameters, "cpu", moments, values)

    def update() -> None:
        grad, master = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (grads, of.master))
        kept = ctypes.byref(c_states(of))
        out = grad if values is USUAL else None  # the new weight takes the gradient's place, which is no small value
        for _ in range(calls):
            function(grad, 1, master, kept, out, 1, ctypes.c_int64(parameters), ctypes.byref(struct))

    return update


def cpu_kernel(parameters: int, threads: int, repeats: int, calls: int = 1, moments: str = "fp32", values: Values = USUAL) -> Rate:
    """The C++ kernel, with each thread on a range of its own: ctypes releases the GIL.

    `calls` is the number of passes in one repeat.
    """
    per_thread = parameters // threads
    updates = [update_of(per_thread, calls, moments, values) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        run = partial(pool.map, lambda update: update(), updates)
        return measure(_named(moments), "cpu", threads, per_thread * threads, repeats, calls, lambda: list(run()), moments, values)


def _named(moments: str) -> str:
    return "hytrain_fx" if moments == "fp32" else f"hytrain_fx, moments in {moments}"


def torch_fused(parameters: int, device: str, threads: int, repeats: int, calls: int = 1, values: Values = USUAL) -> Rate:
    """torch._fused_adamw_ on fp32 gradients; `calls`: passes in one repeat."""
    of = states(parameters, device, values=values)
    master, (m, v) = of.master, of.states
    grad, step = torch.full_like(master, values.grad), torch.tensor(10.0, device=device)
    if threads:
        torch.set_num_threads(threads)

    def update() -> None:
        for _ in range(calls):
            torch._fused_adamw_(
                [master], [grad], [m], [v], [], [step],
                lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()

    return measure("torch._fused_adamw_", device, threads, parameters, repeats, calls, update, values=values)


def cuda_kernel(parameters: int, repeats: int, calls: int, moments: str = "fp32") -> Rate:
    """The CUDA kernel as the engine launches it, `calls` times a repeat.

    It takes a bf16 gradient and writes a bf16 weight.
    """
    of = states(parameters, "cuda", moments)
    grad = torch.full_like(of.master, 0.01, dtype=torch.bfloat16)
    engine = NativeEngine(grad.device, 1, RING_BYTES, TIMEOUT_S)
    row = engine.add_row(RowSpec(parameters, 0, torch.empty_like(grad)))
    engine.place_on_device(row, of)
    item = CommitItem(row, AdamScalars.of({**GROUP, "moments": moments}, 10, decoupled=True, torch_cuda=True), grad, at_end=True)

    def update() -> None:
        for _ in range(calls):
            engine.commit([item])
            engine.wait([row])
        torch.cuda.synchronize()

    try:
        return measure(_named(moments), "cuda", 0, parameters, repeats, calls, update, moments)
    finally:
        engine.close()


def main() -> None:
    """Prints one JSON object: machine, rates."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, default=40 << 20, help="of one update (default: 40 Mi, far more than the caches hold)")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=None, help="as 1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    threads = arguments.threads or [count for count in (1, 2, 4, 8, 16, 32) if count <= cores]
    n, repeats = arguments.parameters, arguments.repeats
    rates = [cpu_kernel(CHUNK_IN_L2, 1, repeats, 200, moments) for moments in ("fp32", "bf16")]
    rates += [torch_fused(CHUNK_IN_L2, "cpu", 1, repeats, calls=200)]
    for count in threads:
        rates += [cpu_kernel(n, count, repeats, moments=moments) for moments in ("fp32", "bf16")]
        rates.append(torch_fused(n, "cpu", count, repeats))
        for values in (UNUSED, VANISHED):
            rates += [cpu_kernel(n, count, repeats, values=values), torch_fused(n, "cpu", count, repeats, values=values)]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": cores, "torch": torch.__version__}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        rates += [cuda_kernel(n, repeats, calls=10, moments=moments) for moments in ("fp32", "bf16")]
        rates += [torch_fused(n, "cuda", 0, repeats, calls=10)]
    print(json.dumps({"machine": machine, "rates": [asdict(rate) for rate in rates]}, indent=1))


if __name__ == "__main__":
    main()
