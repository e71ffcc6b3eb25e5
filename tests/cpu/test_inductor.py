"""The rewrite through all of Inductor: same bits, and traps that stay shut.

No weight that may be overwritten is read.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hytrain_fx.passes.ops import WAIT
from hytrain_fx.torch_private import compiling
from tests.cpu import models
from tests.cpu.loops import Twins, plain_loop
from tests.cpu.recording_nodes import assert_same_weights, compile_rewritten, train

pytestmark = pytest.mark.fused_kernels

CASES = {"mlp": models.mlp, "cnn": models.cnn, "checkpointed gpt": models.checkpointed_gpt, "bf16 gpt": models.bf16_gpt}
# The layouts that capture keeps are kept in the reference too: they change the order of sums in
# convolutions.
REFERENCE_OPTIONS: dict[str, dict[str, Any]] = {"cnn": {"options": {"layout_optimization": False}}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_plain_compile(name: str) -> None:
    """With weights poisoned from release to wait, losses and weights are the plain loop's.

    The plain loop is torch.compile with a plain optimizer.
    """
    torch.manual_seed(0)
    model, batches = CASES[name]()
    plain = copy.deepcopy(model)
    ours = compile_rewritten(model)
    ours.nodes.hide(range(len(ours.names)))
    losses = train(model, batches, ours.nodes.step)
    plain.compile(**REFERENCE_OPTIONS.get(name, {}))
    assert losses == train(plain, batches)
    assert_same_weights(ours, plain)
    assert ours.nodes.count("grad_offload") == dict.fromkeys(range(len(ours.names)), len(batches))


def test_layout_optimization_would_copy_a_weight_ahead_of_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor copies a convolution's weight where the graph begins; the wait finds the copy."""
    import contextlib

    monkeypatch.setattr(compiling, "layouts_kept", contextlib.nullcontext)
    model, batches = models.cnn()
    compile_rewritten(model)
    with pytest.raises(Exception, match="given a copy of the parameter"), torch._inductor.config.patch(force_layout_optimization=True):
        model(*batches[0])


def test_a_write_behind_a_pointwise_reader_is_compiled_wrongly() -> None:
    """Why a backward graph writes to no weight: torch lets an earlier reader see the later value.

    y = x * w; z = sum(x); write(z, w); return relu(y) + 1, z: with x = w = 1 and 101 written, 2 is
    right and 102 comes out.
    """
    with torch.library._scoped_library("hytrain_fx_test", "FRAGMENT") as library:
        library.define("overwrite(Tensor z, Tensor(a!) w) -> ()")
        library.impl("overwrite", lambda z, w: [w.fill_(101.0)].clear(), "CompositeExplicitAutograd")
        torch.library.register_fake("hytrain_fx_test::overwrite", lambda z, w: None, lib=library)
        overwrite = torch.ops.hytrain_fx_test.overwrite.default

        def insert(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            total = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)[0]
            weight = gm.graph.find_nodes(op="placeholder")[1]
            with gm.graph.inserting_after(total):
                gm.graph.call_function(overwrite, (total, weight)).meta["val"] = None
            return compiling.compile_fx_inner(gm, inputs, **kwargs)

        def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * w
            return torch.relu(y) + 1, x.sum(0)

        torch._dynamo.reset()
        with compiling.autograd_cache_off():
            compiled = torch.compile(function, backend=lambda gm, inputs: compiling.compile_fx(gm, inputs, insert, {}))
            result, _ = compiled(torch.ones(4), torch.ones(4))
    assert result.tolist() == [102.0] * 4


def test_an_operator_without_the_mark_is_dropped() -> None:
    """Why `has_side_effect`: Inductor silently drops an operator whose result is not used."""
    ran: list[str] = []
    with torch.library._scoped_library("hytrain_fx_test", "FRAGMENT") as library:
        for name in ("unmarked", "marked"):
            library.define(f"{name}(Tensor x) -> ()")
            library.impl(name, lambda x, name=name: ran.append(name), "CompositeExplicitAutograd")
            torch.library.register_fake(f"hytrain_fx_test::{name}", lambda x: None, lib=library)
        targets = [torch.ops.hytrain_fx_test.unmarked.default, torch.ops.hytrain_fx_test.marked.default]
        torch.fx.node.has_side_effect(targets[1])

        def insert(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            first = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
            with gm.graph.inserting_after(first):
                for target in targets:
                    gm.graph.call_function(target, (first,)).meta["val"] = None
            return compiling.compile_fx_inner(gm, inputs, **kwargs)

        torch._dynamo.reset()
        with compiling.autograd_cache_off():
            compiled = torch.compile(lambda x: x * 2, backend=lambda gm, inputs: compiling.compile_fx(gm, inputs, insert, {}))
            compiled(torch.ones(4))
    assert ran == ["marked"]


def test_waits_survive_inductor_in_order() -> None:
    """The generated forward code has one wait for each unit, each on graph inputs."""
    from torch._inductor.utils import run_and_get_code

    model, batches = models.mlp()
    ours = compile_rewritten(model)
    _, codes = run_and_get_code(model, *batches[0])
    lines = [line.strip() for line in codes[0].splitlines() if f"{WAIT.name().replace('::', '.')}.default(" in line]
    assert len(lines) == len(ours.units)
    assert all("[primals_" in line for line in lines)
    assert isinstance(model, nn.Module)


@pytest.mark.sample(0)
@pytest.mark.parametrize("placed", [{"k": 0}, {"k": 2, "stream": 0}], ids=str)
def test_graphs_that_cpp_launches_train_alike(placed: dict[str, Any]) -> None:
    """Inductor's C++ wrapper calls the nodes too: every one of them, with the plain loop's bits."""
    twins = Twins(models.mlp, options={"cpp_wrapper": True}, **placed)
    twins.agree(plain_loop(4))
    rows = len(twins.session.table)
    assert all(twins.session.nodes.runs[kind] == 4 * rows for kind in ("grad_offload", "cpu_step", "gpu_step", "reload", "wait"))
    twins.close()
