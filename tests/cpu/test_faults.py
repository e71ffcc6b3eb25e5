"""Faults of the machine and its surroundings lose nothing, or end in an error, never in a hang.

The error says what to do.

Elsewhere: workers that fail and second compiles (test_errors), exits, copies, DataLoader workers,
Ctrl-C (test_process_end), builds (test_build), interrupted forwards (test_transaction), gradients
that are not finite (test_nonfinite).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .loops import HYPER, assert_same, plain_loop, weights
from .models import Batches, mlp
from .test_placements import plan_of
from .test_process_end import START, run

Trained = tuple[Any, OffloadedOptimizer, Batches]


@pytest.fixture
def trained() -> Iterator[Trained]:
    """A model after one step, all states on the host."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0, timeout_s=20.0)
    plain_loop(1)(model, optimizer, batches)
    yield model, optimizer, batches
    with contextlib.suppress(errors.HytrainError):  # failed on purpose
        hytrain_fx.close(model)


# ---- host memory ----


def test_memory_that_the_system_refuses_is_a_host_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mmap that fails within the budget is an error that says so, with its size.

    The model stays plain and compiles later.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    optimizer: Any = torch.optim.AdamW(model.parameters(), **HYPER)
    real = mmap.mmap

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(errors.HostMemoryError, match=r"Cannot allocate memory.*gpu_states"):
        hytrain_fx.compile(model, optimizer, k=0)
    monkeypatch.setattr(mmap, "mmap", real)
    plain_loop(1)(model, optimizer, batches)
    _, optimizer = hytrain_fx.compile(model, optimizer, k=0)
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


@pytest.mark.parametrize(("place", "slabs"), [(Placement.CPU, 0), (Placement.CPU, 3), (Placement.STREAM, 1)])
def test_memory_that_runs_out_in_a_move_loses_no_state(
    place: Placement, slabs: int, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that come to a host without room stay where they were.

    Training goes on from there, bit for bit.
    """
    model, optimizer, batches = trained
    session = session_of(model)
    session.place(plan_of(session, [Placement.GPU]))
    before, expected_model = optimizer.state_dict(), copy.deepcopy(model)
    real, given = mmap.mmap, iter(range(slabs))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if next(given, None) is None:
            raise OSError(12, "Cannot allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(errors.HostMemoryError):
        session.place(plan_of(session, [place, Placement.GPU]))
    monkeypatch.setattr(mmap, "mmap", real)
    after = optimizer.state_dict()
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["state"][number][name]), (number, name)
    reference = torch.optim.AdamW(expected_model.parameters(), **HYPER)
    _, reference = hytrain_fx.compile(expected_model, reference, k=0)  # type: ignore[assignment]
    reference.load_state_dict(before)
    assert plain_loop(3)(model, optimizer, batches) == plain_loop(3)(expected_model, reference, batches)
    assert_same(weights(model), weights(expected_model))
    hytrain_fx.close(expected_model)


def test_a_step_needs_no_memory_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses shadow memory, steps train on, counted once each, bit for bit.

    With that memory they would have begun early.
    """
    wide = partial(nn.Linear, 300, 300)  # of more parameters than the least that is worth a shadow
    torch.manual_seed(0)
    model: Any
    model, expected = wide(), wide()
    expected.load_state_dict(model.state_dict())
    batches = [torch.randn(4, 300) for _ in range(5)]
    real = mmap.mmap

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    def train(of: Any, *, refusing: bool) -> dict[int, Any]:
        torch._dynamo.reset()
        _, optimizer = hytrain_fx.compile(of, torch.optim.AdamW(of.parameters(), **HYPER), k=0, speculate=True, engine="native")
        for batch in batches:
            monkeypatch.setattr(mmap, "mmap", refuse if refusing else real)
            of(batch).square().sum().backward()
            for p in of.parameters():  # a tensor as factor, as clip_grad_norm_ and GradScaler leave on a GPU
                object.__getattribute__(p.grad, "grad_state").factors = (torch.tensor(0.5),)
            optimizer.step()
            optimizer.zero_grad()
            monkeypatch.setattr(mmap, "mmap", real)
        found: dict[int, Any] = optimizer.state_dict()["state"]
        hytrain_fx.close(of)
        return found

    states = train(expected, refusing=False), train(model, refusing=True)
    for state in (*states[0].values(), *states[1].values()):
        assert int(state["step"]) == len(batches)
    assert_same(weights(model), weights(expected))


def test_a_move_keeps_the_memory_that_a_dropped_gradient_goes_to(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab of slots is given back only after the engine has been told of the move.

    By then the engine has waited for the copies that were on their way there.
    """
    model, optimizer, batches = trained
    session = session_of(model)
    session.engine.set_delay(Stage.D2H, 20_000)
    model(*batches[0]).backward()
    optimizer.zero_grad()
    slabs = [weakref.ref(slab) for slab in session.states.slabs]
    told: list[bool] = []
    for name in ("place_on_device", "place_streamed", "place_on_host"):
        place = getattr(session.engine, name)

        def note(row: int, states: Any, place: Any = place) -> None:
            told.append(all(slab() is not None for slab in slabs))
            place(row, states)

        monkeypatch.setattr(session.engine, name, note)
    session.place(plan_of(session, [Placement.STREAM, Placement.CPU]))
    assert told
    assert all(told)
    gc.collect()
    assert not all(slab() is not None for slab in slabs)


# ---- copies ----


@pytest.mark.parametrize("gate", ["forward", "read", "state_dict"])
def test_a_copy_to_the_device_that_fails_raises_at_the_next_gate(gate: str, trained: Trained) -> None:
    """A failed copy to the device is raised at the next gate, and nothing hangs.

    The error names the copy and the parameter.
    """
    model, optimizer, batches = trained
    engine = session_of(model).engine
    assert isinstance(engine, NativeEngine)
    model(*batches[0]).backward()
    engine.fail_next_copy(0)
    optimizer.step()
    gates = {"forward": lambda: model(*batches[0]), "read": lambda: model.first.weight.sum(), "state_dict": optimizer.state_dict}
    with pytest.raises(errors.EngineError, match=r"copy to the device.*injected failure in row 0 \(first\.weight\)"):
        gates[gate]()


def test_a_copy_to_the_host_that_fails_is_the_backwards_error(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host that fails is raised by backward(); the committed weights are whole.

    After zero_grad() training goes on as if that backward had not happened.
    """
    model, optimizer, batches = trained
    before, engine = weights(model), session_of(model).engine
    other = copy.deepcopy(model)
    saved = optimizer.state_dict()

    def fail(rows: Any, grads: Any) -> None:
        raise errors.EngineError("copy to the host: CUDA error 700 (an illegal memory access was encountered)")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "grad_offload", fail)
        loss = model(*batches[0])
        with pytest.raises(errors.EngineError, match="CUDA error 700"):
            loss.backward()
    assert_same(weights(model), before)
    optimizer.zero_grad()
    _, fresh = hytrain_fx.compile(other, torch.optim.AdamW(other.parameters(), **HYPER), k=0)
    fresh.load_state_dict(saved)
    assert plain_loop(3)(model, optimizer, batches) == plain_loop(3)(other, fresh, batches)
    assert_same(weights(model), weights(other))
    hytrain_fx.close(other)


# ---- surroundings ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device that is always full")
def test_a_checkpoint_that_a_full_disk_refuses_costs_nothing(trained: Trained, tmp_path: Path) -> None:
    """torch.save to a full disk raises; the loop saves elsewhere and goes on, bit for bit.

    What was saved loads.
    """
    model, optimizer, batches = trained
    expected_model = copy.deepcopy(model)
    for path in (Path("/dev/full"), tmp_path / "checkpoint.pt"):
        with contextlib.nullcontext() if path.parent == tmp_path else pytest.raises((OSError, RuntimeError)):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = plain_loop(3)(model, optimizer, batches)
    saved = torch.load(path)
    expected_model.load_state_dict(saved["model"])
    _, restored = hytrain_fx.compile(expected_model, torch.optim.AdamW(expected_model.parameters(), **HYPER), k=0)
    restored.load_state_dict(saved["optimizer"])
    assert plain_loop(3)(expected_model, restored, batches) == found
    assert_same(weights(expected_model), weights(model))
    hytrain_fx.close(expected_model)


def test_threads_that_the_system_refuses_are_an_error_that_says_so() -> None:
    """When the system refuses threads, the engine ends those that had started.

    The model stays plain, and compiles once fewer are asked for.
    """
    run("""
        import resource
        from hytrain_fx.errors import EngineError
        model, optimizer = make()
        hytrain_fx.compile(model, optimizer, workers=1)  # the engine is built and loaded
        hytrain_fx.close(model)
        model, optimizer = make()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (200 << 20), most))
        try:
            hytrain_fx.compile(model, optimizer, workers=400, engine="native")
        except EngineError as error:
            assert "expected 402 (workers=400, and one for each direction of copies)" in str(error), error
            assert "ask for fewer workers" in str(error), error
        else:
            raise SystemExit("400 threads of 8 MB in 200 MB")
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        assert threads_left() == []
        model, optimizer = hytrain_fx.compile(model, optimizer, workers=2)
        train(model, optimizer)
        hytrain_fx.close(model)
    """)


def test_a_torch_that_is_too_old_is_refused_and_a_new_one_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for an old torch names the version found and the one needed.

    A warning for an untried version says to run the tests.
    """
    model, _ = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(errors.UnsupportedError, match=r"2\.9\.1.*2\.11"):
        hytrain_fx.compile(model, optimizer)
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.warns(errors.HytrainWarning, match=r"2\.14\.0.*scripts/test"):
        hytrain_fx.compile(model, optimizer)
    hytrain_fx.close(model)


def test_without_a_compiler_the_torch_engine_trains_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """engine="auto" warns with what to install; engine="native" is an error that says the same."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    with pytest.raises(errors.EngineError, match="Install g"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), engine="native")
    with pytest.warns(errors.HytrainWarning, match="slower torch engine.*Install g"):
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    monkeypatch.delenv("CXX")  # Inductor's own
    plain_loop(2)(model, optimizer, batches)
    assert session_of(model).engine.name == "torch"
    hytrain_fx.close(model)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_copied_or_pickled_optimizer_is_refused(how: Any, trained: Trained) -> None:
    """The states belong to a running engine: the error says to take state_dict()."""
    with pytest.raises(errors.UnsupportedError, match="state_dict"):
        how(trained[1])


def test_a_forked_child_saves_states_after_a_step_that_may_be_left_out() -> None:
    """Right after step(), with on_nonfinite="skip", a child has the parent's states and counts."""
    run("""
        model, optimizer = hytrain_fx.compile(*make(), k=0, on_nonfinite="skip")
        train(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                found = {row: float(entry["step"]) for row, entry in optimizer.state_dict()["state"].items()}
            except Exception as error:
                found = error
            os.write(writing, repr(found).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        found = os.read(reading, 10000).decode()
        expected = {row: float(entry["step"]) for row, entry in optimizer.state_dict()["state"].items()}
        assert expected and found == repr(expected), found
    """)


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_child_forked_in_mid_update_has_the_new_weights_and_cannot_train(engine: str) -> None:
    """A child forked in mid-update reads the committed weights at once, and cannot train.

    A step in it is an error that says what to do, and the parent trains on.

    A torch that was built for CUDA refuses every backward in such a child, before anything of ours
    is asked.
    """
    out = run(f"""
        from hytrain_fx.runtime.engine import Stage
        model, optimizer = hytrain_fx.compile(*make(), k=0, engine="{engine}", timeout_s=60.0)
        train(model, optimizer)
        session_of(model).engine.set_delay(Stage.CPU_UPDATE, 200000)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            seen = [float(p.detach().sum()) for p in model.parameters()]
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(float(model(torch.ones(2, 4)).sum()))
            try:
                train(model, optimizer, 1)
            except (hytrain_fx.errors.EngineError, RuntimeError) as error:
                seen.append(str(error))
            os.write(writing, repr(seen).encode())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        seen = eval(os.read(reading, 10000).decode())
        assert seen[:-2] == [float(p.detach().sum()) for p in model.parameters()]
        optimizer.zero_grad()
        with torch.no_grad():
            assert seen[-2] == float(model(torch.ones(2, 4)).sum())
        print(seen[-1])
        train(model, optimizer)
    """)
    if torch.version.cuda and "fork-based multiprocessing" in out:
        return
    assert "forked" in out
    assert "spawn" in out


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forked_child_without_the_states_is_told_so(engine: str, dtype: str) -> None:
    """A forked child without the states gets an error that says why, and does not crash.

    Registered host memory is not in a forked child, so states cannot be read or written there.

    Weights can be read there, and the parent trains on and reads its states.
    """
    out = run(f"""
        import mmap
        model, optimizer = make()
        model.to(torch.{dtype})
        model, optimizer = hytrain_fx.compile(model, optimizer, k=0, engine="{engine}", timeout_s=60.0)
        batch = torch.ones(2, 4, dtype=torch.{dtype})
        def step():
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        step()
        saved = optimizer.state_dict()
        for slab in session_of(model).states.slabs:
            slab._map.madvise(mmap.MADV_DONTFORK)  # as `pin` does on a GPU
        pid = os.fork()
        if pid == 0:
            seen = [float(p.detach().sum()) for p in model.parameters()]
            for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
                try:
                    call()
                    os._exit(4)
                except hytrain_fx.errors.EngineError as error:
                    print(error, flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        step()
        assert all(int(state["step"]) == 2 for state in optimizer.state_dict()["state"].values())
    """)
    assert out.count("Read the states in the parent") == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_its_checkpoint_and_nothing_else(number: signal.Signals, tmp_path: Path) -> None:
    """A process killed with updates in flight ends at once.

    What it had saved after a step holds that step's weights and states, whole.
    """
    path = tmp_path / "checkpoint.pt"
    script = START + f"""
from hytrain_fx.runtime.engine import Stage
model, optimizer = hytrain_fx.compile(*make(), k=0)
train(model, optimizer, 3)
session_of(model).engine.set_delay(Stage.CPU_UPDATE, 50000)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
torch.save((model.state_dict(), optimizer.state_dict()), {str(path)!r})
print("saved", flush=True)
train(model, optimizer, 100000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        time.sleep(0.2)
        child.send_signal(number)
        assert child.wait(timeout=30) == -number
    model_state, optimizer_state = torch.load(path, weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(model_state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(optimizer_state)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    for parameter, state in optimizer.state.items():
        assert state["exp_avg_sq"].shape == parameter.shape
