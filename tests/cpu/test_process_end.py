"""Ends: close, interpreter exit, forked workers, copied and pickled models.

Each runs in a process of its own with a time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """
import copy, gc, os, pickle, sys
import torch
import torch._inductor.config
from torch import nn
import hytrain_fx
from hytrain_fx.api import session_of
from tests.cpu.threads import engine_threads, threads_left
torch.set_num_threads(1)
torch._inductor.config.fallback_by_default = True  # as conftest.py has it for modules without fused_kernels

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(body: str, timeout_s: float = 120.0) -> str:
    """Run a script in a new interpreter and give its output. Fails if it does not end in time.

    It also fails where the script ends in an error.
    """
    script = START + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}  # torch refuses CUDA in forked children
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.mark.sample(0)
def test_close_leaves_no_thread() -> None:
    """After close() no engine thread is left, however often a model is compiled and trained."""
    run("""
        for _ in range(2):
            model, optimizer = make()
            model, optimizer = hytrain_fx.compile(model, optimizer, workers=3)
            assert len([name for name in engine_threads().values() if name.startswith("hytrain-cpu-")]) == 3, engine_threads()
            train(model, optimizer)
            hytrain_fx.close(model)
            assert threads_left() == []
    """)


@pytest.mark.sample(0)
def test_a_dropped_model_takes_its_threads_along() -> None:
    """A model that goes out of scope without close() stops its engine when it is collected."""
    run("""
        model, optimizer = make()
        train(*hytrain_fx.compile(model, optimizer))
        assert engine_threads()
        del model, optimizer
        gc.collect()
        assert threads_left() == []
    """)


@pytest.mark.sample(1)
@pytest.mark.parametrize("state", ["idle", "update in flight", "gradient waiting", "sys.exit", "uncaught in a loop"])
def test_exit_without_close_ends_at_once(state: str) -> None:
    """The interpreter ends without a hang, a crash or an error, whatever the engine is doing."""
    act = {
        "idle": "train(model, optimizer)",
        "update in flight": "model(torch.ones(2, 4)).sum().backward(); optimizer.step()",
        "gradient waiting": "model(torch.ones(2, 4)).sum().backward()",
        "sys.exit": "train(model, optimizer); sys.exit(0)",
        "uncaught in a loop": "train(model, optimizer, 1)\ntry:\n    model('no tensor')\nexcept Exception:\n    pass",
    }[state]
    run(f"""
from hytrain_fx.runtime.engine import Stage
model, optimizer = hytrain_fx.compile(*make(), k=0)
session_of(model).engine.set_delay(Stage.CPU_UPDATE, 20000)
print("compiled")
{act}
""")


@pytest.mark.sample(0)
def test_exit_after_a_failed_worker_ends_too() -> None:
    """A worker that has failed does not keep the process alive."""
    run("""
        model, optimizer = hytrain_fx.compile(*make(), k=0)
        train(model, optimizer, 1)
        model(torch.ones(2, 4)).sum().backward()
        session_of(model).engine.fail_next_update(0)
        optimizer.step()
        try:
            hytrain_fx.close(model)
        except hytrain_fx.errors.EngineError:
            pass
    """)


def test_forked_data_loader_workers() -> None:
    """A DataLoader with forked workers runs between steps, and its workers end."""
    out = run("""
        model, optimizer = hytrain_fx.compile(*make(), k=1)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        for epoch in range(2):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        print(len(list(loader)))
    """)
    assert out.strip() == "6"


@pytest.mark.sample(0)
def test_a_forked_child_may_read_weights_and_exit() -> None:
    """A child has the weights but no engine threads: it reads settled weights.

    Its exit neither hangs nor stops the parent.
    """
    run("""
        model, optimizer = hytrain_fx.compile(*make(), k=0)
        train(model, optimizer)
        expected = float(model[0].weight.sum())
        pid = os.fork()
        if pid == 0:
            ok = float(model[0].weight.detach().sum()) == expected
            sys.exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        train(model, optimizer)
    """)


@pytest.mark.sample(0)
def test_copies_and_pickles_are_plain_models() -> None:
    """deepcopy, pickle and torch.save of the model give a plain model that trains on its own.

    It has the committed weights.
    """
    run("""
        import io
        model, optimizer = hytrain_fx.compile(*make(), k=1)
        train(model, optimizer)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
            assert all(type(p) is nn.Parameter for p in other.parameters())
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q) and p is not q
            train(other, torch.optim.AdamW(other.parameters()))
            assert not torch.equal(other[0].weight, model[0].weight)
        train(model, optimizer)
    """)


@pytest.mark.sample(0)
def test_ctrl_c_in_mid_step_loses_nothing() -> None:
    """After a KeyboardInterrupt the session closes or trains on.

    It may come between backward() and step(), or while a forward waits.
    """
    run("""
        import signal
        from hytrain_fx.runtime.engine import Stage
        model, optimizer = hytrain_fx.compile(*make(), k=0)
        train(model, optimizer)
        session_of(model).engine.set_delay(Stage.CPU_UPDATE, 300000)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                train(model, optimizer, 1)
                model[0].weight.sum()
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            optimizer.zero_grad()
        session_of(model).engine.set_delay(Stage.CPU_UPDATE, 0)
        train(model, optimizer)
        hytrain_fx.close(model)
    """)
