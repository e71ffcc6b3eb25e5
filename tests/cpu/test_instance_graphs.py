"""Blocks of one class around graph breaks: Dynamo captures one graph for all of them.

Those whose parameters have one form share its code, each as a graph of its own.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.capture.instance_graphs import rows_alike
from hytrain_fx.ir.plan import Placement
from hytrain_fx.passes.base import PassContext
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.torch_private import compiling
from hytrain_fx.torch_private.compiling import another_thread_runs, isolates_calls
from hytrain_fx.torch_private.modules import compiled_call

from .interpreted import graphs_interpreted
from .loops import HandAdam, assert_same, weights
from .test_placements import plan_of

WIDTH, STEPS = 8, 8


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Each of `order` is a block that is called; a break comes after the first one."""

    def __init__(self, blocks: int, order: tuple[int, ...] = (), checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks=number == 1) for number in range(blocks)])
        self.order, self.checkpoints = order or tuple(range(blocks)), checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and number == 2 else block(x)
        return x.square().mean()


def _freeze(model: Model) -> None:
    model.blocks[2].requires_grad_(False)


def _tie(model: Model) -> None:
    model.blocks[-1].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr]


EAGER = "one checkpointed"  # Dynamo leaves a checkpoint after a break to eager code
CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], None]]] = {
    "2 blocks": (lambda: Model(2), lambda _: None),
    "5 blocks": (lambda: Model(5), lambda _: None),
    "12 blocks, more than Dynamo recompiles": (lambda: Model(12), lambda _: None),
    "one of them frozen": (lambda: Model(4), _freeze),
    "two with one weight": (lambda: Model(4), _tie),
    "one called twice": (lambda: Model(4, order=(0, 1, 2, 3, 2)), lambda _: None),
    "in another order": (lambda: Model(4, order=(3, 1, 0, 2)), lambda _: None),
    EAGER: (lambda: Model(4, checkpoints=True), lambda _: None),
}


def _made(case: str) -> Model:
    torch.manual_seed(0)
    make, change = CASES[case]
    model = make()
    change(model)
    return model


def _train(model: Any, optimizer: Any, *, evaluates: bool, sizes: tuple[int, ...]) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(sizes[step % len(sizes)], WIDTH))
        loss.backward()
        if evaluates:
            with torch.no_grad():
                losses.append(float(model(torch.ones(2, WIDTH))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


LOOPS = {"plain": (False, (4,)), "evaluated": (True, (4,)), "shapes change": (False, (4, 6, 4, 3, 5))}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("evaluates", "sizes"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_one_class_train_as_plain(case: str, evaluates: bool, sizes: tuple[int, ...]) -> None:
    """Same bits with all states on the host and mixed, updates delayed.

    Every block's gradients are taken by nodes of its own graphs.
    """
    torch._dynamo.reset()
    plain = _made(case)
    expected = _train(torch.compile(plain), HandAdam(_trained(plain), lr=1e-2), evaluates=evaluates, sizes=sizes)
    for places in ([Placement.CPU], list(Placement)):
        torch._dynamo.reset()
        model: Any = _made(case)
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(_trained(model), lr=1e-2), k=0, engine="native", warmup_steps=10**6)
        session = session_of(model)
        session.place(plan_of(session, places))
        session.engine.set_delay(Stage.CPU_UPDATE, 500.0)
        assert _train(model, optimizer, evaluates=evaluates, sizes=sizes) == expected
        taken = {row for graph in session.capture.graphs if graph.kind is GraphKind.BACKWARD for row in graph.grad_rows}
        eager = set(range(8, 12)) if case == EAGER else set()
        assert taken == set(range(len(session.table))) - eager
        hytrain_fx.close(model)
        assert_same(weights(model), weights(plain))


# ---- Which sets share their graphs ----


class Passing(Block):
    """Gives its input back too, as the first result: that has the node of the block before it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        torch._dynamo.graph_break()
        return x, self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks that each pass their input on; the sum of all values is the loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Passing() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            before, x = block(x)
            total = total + before.square().mean()
        return total + x.square().mean()


def _ours(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-2)
    return hytrain_fx.compile(model, optimizer, k=0, engine="native", warmup_steps=10**6, **options)


def _as_plain(make: Callable[[], nn.Module], run: Callable[[Any, Any], Any]) -> Any:
    """What `run` gives with plain torch.compile, and with ours, some of whose graphs are shared."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make()
    expected = run(torch.compile(plain), HandAdam(_trained(plain), lr=1e-2))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = _ours(make())
    assert run(model, optimizer) == expected
    assert len(_compiled(session_of(model))) < len(session_of(model).capture.graphs)
    hytrain_fx.close(model)
    assert_same(weights(model), weights(plain))
    return expected


def _compiled(session: Any) -> list[int]:
    """The numbers of graphs that were compiled, not shared."""
    return [graph.index for graph in session.capture.graphs if not graph.rewrite.passes[0].notes[-1].startswith("runs the code of")]


def test_blocks_of_one_form_are_compiled_once() -> None:
    """Ten blocks of one form have a graph number each and one compilation each way.

    The first one is apart: its input takes no gradient. So is the second, which is where the break
    is.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = _ours(Model(12))
    _train(model, optimizer, evaluates=False, sizes=(4,))
    graphs = session_of(model).capture.graphs
    assert len(graphs) == 24
    assert len(_compiled(session_of(model))) == 6
    rows = [graph.grad_rows for graph in graphs if graph.kind is GraphKind.BACKWARD]
    assert sorted(row for of in rows for row in of) == list(range(48))
    hytrain_fx.close(model)


@pytest.mark.parametrize("case", ["two with one weight", "one of them frozen"])
def test_a_set_of_another_form_has_its_own_graphs(case: str) -> None:
    """A tied weight, which is another unit's, and a frozen block are compiled apart."""
    torch._dynamo.reset()
    model, optimizer = _ours(_made(case))
    _train(model, optimizer, evaluates=False, sizes=(4,))
    assert len(_compiled(session_of(model))) == len(session_of(model).capture.graphs)
    hytrain_fx.close(model)


def test_passes_of_the_user_see_each_set() -> None:
    """A pass that is not ours may look at rows by name: nothing is shared."""
    torch._dynamo.reset()

    def looks(module: torch.fx.GraphModule, context: PassContext) -> str:
        return "looked"

    model, optimizer = _ours(Model(5), passes=[*hytrain_fx.DEFAULT_PASSES, looks])
    _train(model, optimizer, evaluates=False, sizes=(4,))
    assert len(_compiled(session_of(model))) == len(session_of(model).capture.graphs) == 10
    hytrain_fx.close(model)


def _twice(model: Any, optimizer: Any) -> list[float]:
    """Two calls for one backward, a call beside an open one, then gradients by hand."""
    losses = []
    for x in torch.randn(STEPS, 2, 4, WIDTH, generator=torch.Generator().manual_seed(1)):
        first, second = model(x[0]), model(x[1])
        (first + second).backward()
        third, fourth = model(x[0] + x[1]), model(x[0] - x[1])
        third.backward()
        fourth.backward()
        trained = _trained(model)
        by_hand = torch.autograd.grad(model(x[1]), trained)
        for parameter, grad in zip(trained, by_hand, strict=True):
            parameter.grad = parameter.grad + grad  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(of.detach()) for of in (first, second, third, fourth)]
    return losses


@pytest.mark.parametrize("make", [lambda: Model(6), lambda: Chain(6)], ids=["values", "inputs passed on"])
def test_each_backward_knows_whose_it_is(make: Callable[[], nn.Module]) -> None:
    """Open calls of shared graphs, and torch.autograd.grad, give the bits of plain."""
    _as_plain(make, _twice)


@pytest.mark.parametrize("weights_rest", ["resident", "streamed"])
def test_weights_on_the_host_and_fp32_under_autocast(weights_rest: str) -> None:
    """Sets that share fetch their own weights, or cast them; losses are those of plain."""

    def run(model: Any, optimizer: Any, dtype: torch.dtype) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(6):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
                loss = model(torch.randn(4, WIDTH).to(dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    dtype = torch.bfloat16 if weights_rest == "streamed" else torch.float32
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Model(6).to(dtype)
    resident, optimizer = _ours(plain) if weights_rest == "streamed" else (torch.compile(plain), HandAdam(_trained(plain), lr=1e-2))
    expected = run(resident, optimizer, dtype)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = _ours(Model(6).to(dtype), weights=weights_rest)
    assert run(model, optimizer, dtype) == expected
    session = session_of(model)
    assert len(_compiled(session)) < len(session.capture.graphs)
    assert (session.nodes.runs["fetch"] > 0) == (weights_rest == "streamed")
    hytrain_fx.close(model)


def test_a_hook_on_one_block_alone() -> None:
    """A hook that comes to one block of several that share sees its gradients, bits as plain."""

    def run(model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
        seen: list[float] = []
        torch.manual_seed(1)
        losses = []
        for step in range(6):
            if step == 3:
                model.blocks[3].up.weight.register_hook(lambda grad: seen.append(float(grad.sum())))
            loss = model(torch.randn(4, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, seen

    expected = _as_plain(lambda: Model(6), run)
    assert len(expected[1]) == 3


def test_two_threads_run_one_graph_with_sets_of_their_own() -> None:
    """Each thread's backwards are those of its calls: halves of a batch, added, as in plain."""

    def run(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for x in torch.randn(4, 2, 4, WIDTH, generator=torch.Generator().manual_seed(1)):
            with ThreadPoolExecutor(1) as pool:
                halves = [pool.submit(model, x[0]).result(), model(x[1])]
            (halves[0] + halves[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(of.detach()) for of in halves]
        return losses

    _as_plain(lambda: Model(6), run)


def test_inspect_and_dumps_name_the_rows_of_each_set(tmp_path: Path) -> None:
    """Each graph's text, notes and dump have its own rows, and say whose code it runs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = _ours(Model(5), dump=tmp_path)
    _train(model, optimizer, evaluates=False, sizes=(4,))
    inspection = hytrain_fx.inspect(model)
    found = inspection.find("blocks.4")
    assert {node.op for node in found} >= {"wait", "grad_offload", "cpu_step", "release"}
    assert all(set(node.layers) == {"blocks.4"} for node in found)
    names = {node.graph for node in found}
    assert len(names) == 2
    assert str(inspection).count("runs the code of 02.forward") == 2
    for name in names:
        of_pass = "insert_waits" if "forward" in name else "insert_steps"
        (text,) = [path.read_text() for path in tmp_path.glob(f"{name}.*.{of_pass}.after.txt")]
        assert re.search(r"hytrain_fx\.(wait|cpu_step)\.default\(.*\[16[,\]]", text)
    ends = [re.findall(r"backward_end\.default\(.*, (\d+), \[", graph.after) for graph in inspection if graph.kind == "backward"]
    assert ends == [[str(graph.index)] for graph in inspection if graph.kind == "backward"]
    hytrain_fx.close(model)


class InPlace(Block):
    """Adds to its input in place, and gives it, nothing, or what has no gradient."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        torch._dynamo.graph_break()
        more = torch.tanh(self.down(self.up(x * 2)))
        x += more
        return x if self.gives == "its input" else more.detach() if self.gives == "no gradient" else None


class Residual(nn.Module):
    """Blocks that write one tensor in place."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([InPlace(gives) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            block(x)
        return x.square().mean()


class Prompted(nn.Module):
    """Blocks, and others that write parts of what the last of them gave."""

    def __init__(self, gives: str, prompts: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks=True) for _ in range(3)])
        self.prompts = nn.ModuleList([InPlace(gives) for _ in range(prompts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for prompt, part in zip(self.prompts, (x[:2], x[2:], x[1:3]), strict=False):
            prompt(part)
        return x.square().mean()


GIVES = ("its input", "nothing", "no gradient")


@pytest.mark.parametrize("gives", GIVES)
def test_blocks_that_write_their_input(gives: str) -> None:
    """Where no result leads to a call's node, its inputs do: bits as plain."""
    _as_plain(lambda: Residual(gives), partial(_train, evaluates=False, sizes=(4,)))


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("gives", GIVES)
def test_blocks_that_write_a_part_of_what_others_gave(gives: str, prompts: int) -> None:
    """The part's node leads to theirs too, which are not of this call: bits as plain."""
    _as_plain(lambda: Prompted(gives, prompts), partial(_train, evaluates=False, sizes=(4,)))


def _one_step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


needs_room = pytest.mark.skipif(not isolates_calls() and another_thread_runs(),
                                reason="torch before 2.13 makes room where no other thread runs Python")


@needs_room
def test_blocks_are_compiled_however_many_models_came_before() -> None:
    """Dynamo keeps what it compiled with the class's code, up to a limit."""
    torch._dynamo.reset()
    graphs = []
    with graphs_interpreted():
        for _ in range(torch._dynamo.config.recompile_limit + 2):
            model, optimizer = _ours(Prompted("nothing", 1))
            _one_step(model, optimizer)
            graphs.append(len(session_of(model).capture.graphs))
            hytrain_fx.close(model)
    assert graphs == [8] * len(graphs)


@needs_room
def test_blocks_are_compiled_however_often_hooks_come() -> None:
    """Each new hook has all captured again. The other models of the class train on."""
    torch._dynamo.reset()
    with graphs_interpreted():
        other, its_optimizer = _ours(Model(3))
        model, optimizer = _ours(Model(3))
        for step in range(torch._dynamo.config.recompile_limit + 2):
            handle = model.blocks[step % 3].up.weight.register_hook(lambda grad: grad)
            before = len(session_of(model).capture.graphs)
            _one_step(model, optimizer)
            assert len(session_of(model).capture.graphs) == before + 6
            handle.remove()
            _one_step(other, its_optimizer)
            assert all(of.grad is None for of in other.parameters())
        hytrain_fx.close(model)
        hytrain_fx.close(other)


def test_threads_that_wait_run_no_model() -> None:
    """One of a pool without work, one that waits for an event; but one in its own code may."""
    before, event = another_thread_runs(), threading.Event()  # of what runs the tests
    frames = sys._current_frames

    def frame_of(thread: threading.Thread) -> FrameType:
        while (found := frames().get(thread.ident or 0)) is None or not compiling._waits(found):
            time.sleep(0.01)
        return found

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        (idle,) = pool._threads
        waiting = threading.Thread(target=event.wait)
        waiting.start()
        assert frame_of(idle)
        assert frame_of(waiting)
        assert another_thread_runs() == before
        begun = threading.Event()

        def works() -> None:
            begun.set()
            event.wait()

        worker = pool.submit(works)
        begun.wait()
        assert another_thread_runs()
        event.set()
        waiting.join()
        worker.result()


@pytest.mark.parametrize("alone", [True, False])
def test_room_is_made_only_where_no_other_thread_runs(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all calls' forms count together: a thread that is in the code would lose its memory."""
    monkeypatch.setattr(compiling, "isolates_calls", lambda: False)
    monkeypatch.setattr(compiling, "another_thread_runs", lambda: True)  # close() makes no room meanwhile
    torch._dynamo.reset()
    with graphs_interpreted():
        for _ in range(torch._dynamo.config.recompile_limit // 2):
            model, optimizer = _ours(Model(2))
            _one_step(model, optimizer)
            (of_layout,) = compiled_call(model)._forward.compiled.values()
            hytrain_fx.close(model)
    call, forms = of_layout.compiled, torch._dynamo.eval_frame._debug_get_cache_entry_list
    before = [len(forms(code())) for code in call.codes.values()]
    if alone:
        monkeypatch.setattr(compiling, "another_thread_runs", lambda: False)
    call.forget()
    after = [len(forms(code())) for code in call.codes.values()]
    most = torch._dynamo.config.recompile_limit // 2
    assert after == ([0 if count >= most else count for count in before] if alone else before)
    assert max(before) >= most


def test_an_input_that_another_thread_has_made() -> None:
    """Nodes of autograd are numbered in each thread: what an input leads to is told by itself."""

    def run(model: Any, optimizer: Any) -> list[float]:
        losses = []
        torch.manual_seed(1)
        for _ in range(4):
            made = torch.randn(4, WIDTH, requires_grad=True)
            for _ in range(50):
                made = made * 1.0
            with ThreadPoolExecutor(1) as pool:
                loss = pool.submit(model, made).result()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    _as_plain(lambda: Chain(4), run)


def test_a_hook_before_the_first_backward() -> None:
    """The hook sees its gradient. The next call captures again, and keeps that gradient alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = _ours(Model(6))
    seen: list[torch.Tensor] = []
    loss = model(torch.ones(4, WIDTH))
    handle = model.blocks[3].up.weight.register_hook(seen.append)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert len(seen) == 1
    before = len(session_of(model).capture.graphs)
    _train(model, optimizer, evaluates=False, sizes=(4,))
    assert len(seen) == 1 + STEPS
    kept = {row for graph in session_of(model).capture.graphs[before:] for row in graph.kept_grads}
    assert kept == {12}
    handle.remove()
    hytrain_fx.close(model)


def test_nothing_of_a_dropped_model_stays() -> None:
    """torch keeps compiled code: neither bf16 copies under autocast nor graphs' texts with it."""
    torch._dynamo.reset()
    model, optimizer = _ours(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session = session_of(model)
    kept = [weakref.ref(of) for of in (*session.states.copies.tensors.values(), *session.capture.graphs, session.capture)]
    assert len(kept) > 3
    hytrain_fx.close(model)
    del model, optimizer, session, loss
    gc.collect()
    assert not [of() for of in kept if of() is not None]


@given(st.data())
def test_sets_are_alike_as_their_order_and_units_are(data: st.DataObject) -> None:
    """A shifted set is alike; one with two rows exchanged, a tied row or another unit is not."""
    count = data.draw(st.integers(2, 6))
    unit_of_place = sorted(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    unit_of = {row: 3 * (row // count) + unit_of_place[row % count] for row in range(3 * count)}
    places = data.draw(st.permutations(range(count)))
    of, other = ({place: count * block + row for place, row in enumerate(places)} for block in (0, 2))
    assert rows_alike(of, other, unit_of) == {row: row + 2 * count for row in range(count)}
    first, second = data.draw(st.permutations(range(count)))[:2]
    assert rows_alike(of, other | {first: other[second], second: other[first]}, unit_of) is None
    assert rows_alike(of, other | {first: other[second]}, unit_of) is None
    assert rows_alike(of, {place: row for place, row in other.items() if place != first}, unit_of) is None
    moved = unit_of | {other[first]: 100}
    alone = list(unit_of_place).count(unit_of_place[places[first]]) == 1 and places[first] == count - 1
    assert (rows_alike(of, other, moved) is None) != alone
