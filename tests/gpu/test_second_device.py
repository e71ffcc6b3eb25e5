"""A model on another device than the first: nothing is made on the first one.

The loop's current device stays the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
START = """
import ctypes, torch, hytrain_fx
torch.use_deterministic_algorithms(True)

def has_context(ordinal):
    driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)

def train(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1)).to("cuda:1")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    if options:
        net, optimizer = hytrain_fx.compile(net, optimizer, warmup_steps=2, **options)
    else:
        net = torch.compile(net)
    for step in range(10):
        loss = net(torch.randn(8, 300, device="cuda:1")).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.current_device() == 0
    optimizer.state_dict()
    found = [p.detach().cpu() for p in net.parameters()]
    if options:
        hytrain_fx.explain(net)
        hytrain_fx.close(net)
    assert torch.cuda.current_device() == 0
    return found
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", ["k=0", "k=1", "", "k=0, engine='torch'"])
@pytest.mark.parametrize("first_in_use", [False, True])
def test_a_model_on_the_second_device_leaves_the_first_alone(options: str, first_in_use: bool) -> None:
    """No context is made on the first device where the loop has made none.

    Where it has made one, events are still of the right device.
    """
    run(f"""
        if {first_in_use}:
            torch.ones(1, device="cuda:0")
        expected = train()
        assert has_context(0) == {first_in_use}, "torch alone"
        assert all(map(torch.equal, train(), expected)), "the plain loop differs from itself"
        found = train(timeout_s=60.0{", " * bool(options)}{options})
        assert has_context(1)
        assert has_context(0) == {first_in_use}, "hytrain_fx has made a context on the first device"
        assert all(map(torch.equal, found, expected))
    """)


def run(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-c", START + textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
