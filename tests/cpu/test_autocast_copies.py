"""Fp32 weights that only autocast reads have bf16 copies on the device.

Every bit is the plain fp32 loop's.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.guard import is_guarded

from .loops import HYPER, Loop, Twins, assert_same, compare, weights
from .models import Batches
from .test_placements import plan_of

# Their first compilation takes half a minute: .ci/run names this file.
pytestmark = [pytest.mark.fused_kernels, pytest.mark.sample(0)]

TOKENS, WIDTH = 23, 16
COPIED = {"up.weight", "down.weight", "head.weight"}


class Net(nn.Module):
    """Linear layers that are read once, and three weights that stay in fp32.

    Those are a layer that is read twice, an embedding and a norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = self.twice(torch.tanh(self.twice(x)))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), (tokens * 5 + 2).flatten() % TOKENS)


def net() -> tuple[nn.Module, Batches]:
    return Net(), [(torch.randint(0, TOKENS, (3, 7)),) for _ in range(3)]


def cast(on: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext()


def bytes_of(session: Session) -> dict[str, int]:
    """Bytes of each parameter's own memory, looked up without touching it."""
    with without_torch_function():
        return {name: p.untyped_storage().nbytes() for name, p in zip(session.table.names, session.table.parameters, strict=True)}


def copied(session: Session) -> set[str]:
    return {session.table.names[row] for row in session.states.copies}


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    """One pair of models for all loops.

    A first step under autocast makes the copies; then both start again.
    """
    made = Twins(net, workers=2, timeout_s=60.0, warmup_steps=10**6)  # tests place states: no plan of its own comes between
    made.agree(steps(lambda model, optimizer, step: None, count=1))
    assert copied(made.session) == COPIED
    yield made
    made.close()


def steps(before_step: Callable[[Any, Any, int], Any], count: int = 4, casts: Callable[[int], bool] = lambda step: True) -> Loop:
    """Ordinary steps, with something done between backward() and step()."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for step in range(count):
            with cast(casts(step)):
                loss = model(*batches[step % len(batches)])
            loss.backward()
            found = before_step(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            seen += [float(loss.detach()), *([] if found is None else [float(found)])]
        return seen

    return loop


def grad_of(model: Any) -> torch.Tensor:
    """The gradient of a weight with a copy."""
    gradient: torch.Tensor = model.up.weight.grad
    return gradient


def _accumulate(model: Any, step: int) -> None:
    tokens = torch.arange(21).view(3, 7) * (step + 1) % TOKENS
    for _ in range(2):
        with cast():
            loss = model(tokens)
        loss.backward()


def _half_a_backward(model: Any) -> torch.Tensor:
    with cast():
        loss = model(torch.arange(21).view(3, 7))
    given = torch.autograd.grad(loss, [model.up.weight, model.norm.weight])
    assert given[0].dtype == torch.float32
    return torch.as_tensor(given[0].abs().sum() + given[1].abs().sum())


def _evaluated(model: Any, on: bool) -> torch.Tensor:
    with torch.no_grad(), cast(on):
        return torch.as_tensor(model(torch.arange(21).view(3, 7)))


def _read_and_evaluated_before_backward(model: Any) -> torch.Tensor:
    """A weight that was only read does not count as written."""
    with cast():
        loss = model(torch.arange(21).view(3, 7) % TOKENS)
    read = model.up.weight.sum() + model.head.weight.sum()
    with torch.no_grad(), cast():
        read = read + model(torch.arange(14).view(2, 7) % TOKENS)
    loss.backward()
    return read  # type: ignore[no-any-return]


def _edited(model: Any) -> torch.Tensor:
    grad_of(model).add_(1e-3)
    return torch.as_tensor(grad_of(model).norm())


def _put(model: Any) -> None:
    model.up.weight.grad = torch.full_like(model.up.weight, 1e-2)


BETWEEN: dict[str, Callable[[Any, Any, int], Any]] = {
    "nothing": lambda model, optimizer, step: None,
    "clip": lambda model, optimizer, step: clip_grad_norm_(model.parameters(), 0.01),
    "clip, not foreach": lambda model, optimizer, step: clip_grad_norm_(model.parameters(), 0.01, foreach=False),
    "clip by value": lambda model, optimizer, step: clip_grad_value_(model.parameters(), 1e-3),
    "accumulate": lambda model, optimizer, step: _accumulate(model, step),
    "read": lambda model, optimizer, step: grad_of(model).abs().sum(),
    "scale by a third": lambda model, optimizer, step: grad_of(model).mul_(1 / 3).dtype.itemsize,
    "scale by a tensor": lambda model, optimizer, step: grad_of(model).mul_(torch.tensor(1 / 3)).dtype.itemsize,
    "edit": lambda model, optimizer, step: _edited(model),
    "put another": lambda model, optimizer, step: _put(model),
    "weights read": lambda model, optimizer, step: model.up.weight.detach().abs().sum(),
    "evaluate": lambda model, optimizer, step: _evaluated(model, on=True),
    "evaluate without autocast": lambda model, optimizer, step: _evaluated(model, on=False),
    "read and evaluate before backward": lambda model, optimizer, step: _read_and_evaluated_before_backward(model),
    "torch.autograd.grad": lambda model, optimizer, step: _half_a_backward(model),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_loops_do_gives_the_bits_of_the_plain_loop(twins: Twins, between: Callable[[Any, Any, int], Any]) -> None:
    """Norms, factors, sums and edits act on fp32 gradients.

    Losses, values and weights are the plain loop's.
    """
    twins.agree(steps(between))


def test_autocast_may_come_and_go(twins: Twins) -> None:
    """Steps without autocast read the updated fp32 weight, and their fp32 gradients update it."""
    twins.agree(steps(BETWEEN["clip"], count=6, casts=lambda step: step % 3 != 1))


def test_what_is_written_to_a_weight_counts(twins: Twins) -> None:
    """A write to a weight becomes the master, with all its fp32 bits.

    It may be in place, through `.data`, by load_state_dict, or a swap and back.
    """

    def write(model: Any, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            if step == 0:
                model.up.weight.mul_(1.0001)
            elif step == 1:
                model.down.weight.data = model.down.weight.data * 0.9
            elif step == 2:
                model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})
            else:
                before = model.head.weight.detach().clone()
                model.head.weight.fill_(0.1)
                with cast():
                    assert float(model(torch.zeros(3, 7, dtype=torch.int64))) > 0
                model.head.weight.copy_(before)

    twins.agree(steps(write))


def test_views_of_a_weight_stay_true(twins: Twins) -> None:
    """A view that the loop keeps has memory, and shows the last update at the next forward."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        view, seen = model.up.weight.detach(), []
        for batch in batches:
            with cast():
                loss = model(*batch)
            seen.append(float(view.sum()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    twins.agree(loop)


def test_a_weight_in_the_loss_beside_the_model(twins: Twins) -> None:
    """A penalty that eager code makes of the weight adds its fp32 gradient to the graph's.

    What the penalty saved for the backward stays intact.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for batch in batches:
            penalty = model.up.weight.square().sum()
            with cast():
                loss = model(*batch) + 1e-2 * penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return seen

    twins.agree(loop)


def test_a_backward_through_weights_that_were_updated_is_torchs_error(twins: Twins) -> None:
    """A copy that a forward saved notices that an update has written it."""
    _, optimizer = twins.restart()
    with cast():
        early, late = (twins.ours(*batch) for batch in twins.batches[:2])
    late.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_a_weight_may_be_frozen(twins: Twins) -> None:
    """A weight with a copy that requires no gradient any more keeps its value, read or not."""

    def freeze(model: Any, optimizer: Any, step: int) -> torch.Tensor:
        model.up.weight.requires_grad_(step < 1)
        model.up.weight.grad = None
        return torch.as_tensor(model.up.weight.detach().sum())

    twins.agree(steps(freeze, count=3))
    for model in (twins.plain, twins.ours):
        model.up.weight.requires_grad_(True)


def test_schedulers_and_scalers(twins: Twins) -> None:
    """A learning rate that changes and a loss scale that overflows once: as in the plain loop."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        seen = []
        for step in range(6):
            with cast():
                loss = model(*batches[step % 3])
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            seen += [float(loss.detach()), scaler.get_scale()]
        return seen

    twins.agree(loop)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plans=st.lists(st.lists(st.sampled_from(list(Placement)), min_size=1, max_size=5), min_size=1, max_size=4), clips=st.booleans())
def test_no_sequence_of_placements_changes_a_bit(twins: Twins, plans: list[list[Placement]], clips: bool) -> None:
    """Masters move between halves on the host and the parameter's own memory on the device."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for places in plans:
            if model is twins.ours:
                twins.session.place(plan_of(twins.session, places))
            losses += steps(BETWEEN["clip" if clips else "nothing"], count=2)(model, optimizer, batches)
        return losses

    twins.agree(loop)


def test_what_travels_and_what_rests(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps a weight with a copy has no fp32 memory.

    Its copy has 2 bytes an element, and 2 bytes of gradient an element leave the device.
    """
    session = twins.session
    session.place(plan_of(session, [Placement.CPU]))
    offload = session.engine.grad_offload
    sent: dict[str, int] = {}

    def counted(rows: Any, grads: Any) -> None:
        sent.update((session.table.names[row], grad.nbytes) for row, grad in zip(rows, grads, strict=True))
        offload(rows, grads)

    _, optimizer = twins.restart()
    monkeypatch.setattr(session.engine, "grad_offload", counted)
    steps(BETWEEN["clip"], count=2)(twins.ours, optimizer, twins.batches)
    numels = {name: p.numel() for name, p in zip(session.table.names, session.table.parameters, strict=True)}
    assert sent == {name: numel * (2 if name in COPIED else 4) for name, numel in numels.items()}
    assert bytes_of(session) == {name: 0 if name in COPIED else 4 * numel for name, numel in numels.items()}
    assert {session.table.names[row]: c.nbytes for row, c in session.states.copies.tensors.items()} == {n: 2 * numels[n] for n in COPIED}
    view = twins.ours.up.weight.detach()
    steps(BETWEEN["nothing"], count=1)(twins.ours, optimizer, twins.batches)
    assert bytes_of(session)["up.weight"] == view.nbytes, "a view is held"
    del view
    steps(BETWEEN["nothing"], count=1)(twins.ours, optimizer, twins.batches)
    assert bytes_of(session)["up.weight"] == 0
    memory = hytrain_fx.explain(twins.ours).memory
    assert memory.estimate is not None
    assert memory.weights_bytes == sum(numel * (2 if name in COPIED else 4) for name, numel in numels.items())
    assert memory.host_bytes == memory.estimate.host_bytes


def start(make: Callable[[], tuple[nn.Module, Batches]] = net, **options: Any) -> tuple[Any, Any, Batches]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = make()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), workers=2, **options)
    return model, optimizer, batches


def test_checkpoints_are_those_of_fp32_training() -> None:
    """Both state_dicts have the keys, dtypes and bits of training without copies.

    Either run goes on from the other's checkpoint.
    """
    saved: list[Any] = []
    for option in (True, False):
        model, optimizer, batches = start(autocast_copies=option)
        loop = steps(BETWEEN["clip"], count=2)
        loop(model, optimizer, batches)
        assert copied(session_of(model)) == (COPIED if option else set())
        half = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if saved:  # go on from the other run's, the states first: whatever comes last counts
            optimizer.load_state_dict(saved[0][0][1])
            model.load_state_dict(saved[0][0][0])
            optimizer.load_state_dict(saved[0][0][1])
        loop(model, optimizer, batches)
        saved.append((half, copy.deepcopy((model.state_dict(), optimizer.state_dict()))))
        if option:
            model.load_state_dict(half[0])
            optimizer.load_state_dict(half[1])
            loop(model, optimizer, batches)
            assert_same(weights(model), saved[0][1][0])
        hytrain_fx.close(model)
    for with_copies, without in zip(*saved, strict=True):
        assert_same(with_copies[0], without[0])
        assert with_copies[1]["state"].keys() == without[1]["state"].keys()
        for entry, expected in zip(with_copies[1]["state"].values(), without[1]["state"].values(), strict=True):
            assert_same(entry, expected)


def test_weights_that_are_loaded_after_a_checkpoint_count() -> None:
    """Also where another thread has read weights, so that fp32 memory stays and is not watched."""
    model, optimizer, batches = start(k=0)
    train = steps(BETWEEN["nothing"], count=2)
    train(model, optimizer, batches)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reader = threading.Thread(target=lambda: float(model.up.weight.detach().sum()))
    reader.start()
    reader.join()
    train(model, optimizer, batches)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    best = {name: 2 * value for name, value in saved[0].items()}
    model.load_state_dict(best)
    optimizer.step()
    assert_same(weights(model), best)
    with torch.no_grad(), cast():
        found = model(*batches[0])  # from the copies
    hytrain_fx.close(model)
    with torch.no_grad(), cast():
        assert torch.allclose(found, model(*batches[0]), rtol=1e-3)


def test_parameters_have_their_memory_when_training_is_over() -> None:
    """After close(), in a copy, or without its model, a parameter has the last update's weight."""
    for end in ("close", "drop"):
        model, optimizer, batches = start()
        steps(BETWEEN["nothing"], count=2)(model, optimizer, batches)
        kept = model.up.weight
        assert bytes_of(session_of(model))["up.weight"] == 0
        copied_model = copy.deepcopy(model)
        if end == "drop":
            del model, optimizer
            gc.collect()
        else:
            hytrain_fx.close(model)
        with without_torch_function():
            assert kept.untyped_storage().nbytes() == 4 * kept.numel()
        found = kept.detach().clone()
        assert torch.equal(found, copied_model.up.weight)


def test_a_thread_that_reads_after_the_loop_has_read_finds_memory() -> None:
    """The loop's own read hides no other thread's: fp32 memory stays from then on.

    The thread may read while compiled code runs.
    """
    model, optimizer, batches = start(k=0)
    train = steps(BETWEEN["nothing"], count=2)
    train(model, optimizer, batches)
    assert bytes_of(session_of(model))["up.weight"] == 0
    read, ended = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.is_set():
            float(model.up.weight.detach().sum())
            read.set()

    thread = threading.Thread(target=look)
    float(model.up.weight.detach().sum() + model.norm.weight.detach().sum())
    assert is_guarded(model.up.weight)
    assert not is_guarded(model.norm.weight)
    thread.start()
    try:
        assert read.wait(20.0)
        train(model, optimizer, batches)
        assert bytes_of(session_of(model))["up.weight"] > 0
    finally:
        ended.set()
        thread.join()
        hytrain_fx.close(model)


def from_a_buffer() -> tuple[nn.Module, Batches]:
    model = Net()
    for name in COPIED:
        weight = model.get_parameter(name)
        weight.data = torch.frombuffer(bytearray(weight.detach().numpy().tobytes()), dtype=torch.float32).view(weight.shape)
    return model, net()[1]


def broken() -> tuple[nn.Module, Batches]:
    class Broken(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(tokens)

    return Broken(), net()[1]


@pytest.mark.parametrize(("make", "options"), [
    (broken, {}), (from_a_buffer, {}), (net, {"engine": "torch"}),
], ids=["graph break", "memory of others", "torch engine"])
def test_models_that_stay_in_fp32(make: Any, options: dict[str, Any]) -> None:
    """Some models get no copies, and their weights keep their memory.

    They have a graph break, memory that is not torch's, or the torch engine.
    """
    model, optimizer, batches = start(make, **options)
    steps(BETWEEN["nothing"], count=2)(model, optimizer, batches)
    session = session_of(model)
    assert not copied(session)
    assert all(bytes_of(session).values())
    hytrain_fx.close(model)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3))).float().square().mean()  # type: ignore[no-any-return]


def test_a_convolution_under_autocast() -> None:
    """Weights of convolutions have copies in their order of memory."""
    inside: list[set[str]] = []

    def make() -> tuple[nn.Module, Batches]:
        model: Any = Conv()
        return model.to(memory_format=torch.channels_last), [(torch.randn(2, 3, 6, 6),) for _ in range(3)]

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = steps(BETWEEN["clip"], count=3)(model, optimizer, batches)
        session = find_session(model)
        if session is not None:
            inside.append(copied(session))
        return losses

    compare(make, loop)
    assert inside == [{"conv.weight", "head.weight"}]


def test_hooks_see_fp32_gradients(twins: Twins) -> None:  # the last of the pair: its graphs return this gradient from now on
    """A hook on a weight with a copy gets the fp32 gradient, and what it returns counts.

    It is registered in mid-training.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen: list[float] = []
        losses = steps(BETWEEN["nothing"], count=2)(model, optimizer, batches)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            assert grad.dtype == torch.float32
            seen.append(float(grad.sum()))
            return grad * 0.3

        handle = model.up.weight.register_hook(hook)
        losses += steps(BETWEEN["clip"], count=2)(model, optimizer, batches)
        handle.remove()
        return losses + seen

    twins.agree(loop)
