"""Where the managed parameters are in captured graphs.

Graphs run node by node here, so nothing waits for Inductor's code generation.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import hytrain_fx.capture.backend
from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.capture.pairs import has_user_hooks
from hytrain_fx.errors import CaptureError, UnsupportedError
from hytrain_fx.torch_private import compiling
from hytrain_fx.torch_private.options import graph_order_kept
from tests.cpu import models
from tests.cpu.interpreted import graphs_interpreted
from tests.cpu.recording_nodes import (
    assert_trains_alike,
    capture_only,
    compile_rewritten,
    train,
)

pytestmark = pytest.mark.inductor

SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
KIND = "single_label_classification"  # left out, the library sets it at the first forward, which recompiles


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Graphs run node by node."""
    with graphs_interpreted():
        yield


class LossOf(nn.Module):
    """A transformers model whose forward returns its loss."""

    def __init__(self, inner: nn.Module, **names: str) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(**{self.names.get("x", "input_ids"): x, "labels": y}).loss  # type: ignore[no-any-return]


def _tokens() -> torch.Tensor:
    return torch.randint(0, 11, (2, 6))


def transformers_case(name: str) -> tuple[nn.Module, models.Batches]:
    """A tiny model of the library with random weights, and batches."""
    if name == "vit":
        vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, hidden_dropout_prob=0.0, problem_type=KIND, **SMALL))
        return LossOf(vit, x="pixel_values"), [(torch.randn(2, 3, 8, 8), torch.randint(0, 2, (2,))) for _ in range(2)]
    if name == "bert":
        config = BertConfig(vocab_size=11, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type=KIND, **SMALL)
        return LossOf(BertForSequenceClassification(config)), [(_tokens(), torch.randint(0, 2, (2,))) for _ in range(2)]
    if name == "gpt2":
        gpt2 = GPT2Config(vocab_size=11, n_layer=2, n_embd=8, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = GPT2LMHeadModel(gpt2)
        model.loss_type = "ForCausalLM"  # left out, the library logs a warning, which breaks the graph
        return LossOf(model), [(x, x) for x in (_tokens(), _tokens())]
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_key_value_heads=2, **SMALL))
    return LossOf(llama), [(x, x) for x in (_tokens(), _tokens())]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", models.CASES)
def test_every_parameter_and_gradient_is_found(name: str) -> None:
    """Each trainable parameter has its placeholder in the forward, its gradient in the backward.

    The gradient has the parameter's shape.
    """
    model, batches = models.CASES[name]()
    (forward, backward), _ = capture_only(model, batches[0])
    shapes = dict(enumerate(p.shape for p in model.parameters() if p.requires_grad))
    assert {row: node.meta["val"].shape for row, node in forward.weights.items()} == shapes
    assert {row: backward.gradient(row).meta["val"].shape for row in backward.grads} == shapes
    assert (forward.kind, backward.kind, forward.pair, backward.pair) == (GraphKind.FORWARD, GraphKind.BACKWARD, 0, 0)
    assert (forward.name, backward.name) == ("00.forward", "01.backward")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", models.CASES)
def test_models_train_alike(name: str, interpreted: None) -> None:
    """Models train to the same bits though their weights are poisoned while they may change.

    Each gradient is offloaded once a step.
    """
    model, batches = models.CASES[name]()
    ours = assert_trains_alike(model, batches)
    rows = range(len(ours.names))
    for kind in ("grad_offload", "cpu_step", "gpu_step", "reload", "wait"):
        assert ours.nodes.count(kind) == dict.fromkeys(rows, len(batches)), kind
    released = ours.nodes.count("release")
    ended = ours.nodes.count("backward_end")
    assert {row: released.get(row, 0) + ended.get(row, 0) for row in rows} == dict.fromkeys(rows, len(batches))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_transformers_models_train_alike(name: str, interpreted: None) -> None:
    """Library models, whole in one graph pair, train to the same bits."""
    torch.manual_seed(0)
    model, batches = transformers_case(name)
    ours = assert_trains_alike(model, batches)
    assert [graph.kind for graph in ours.capture.graphs] == [GraphKind.FORWARD, GraphKind.BACKWARD]
    trained = {row for row in range(len(ours.names)) if ours.nodes.count("grad_offload").get(row)}
    assert trained == set(range(len(ours.names)))


def test_unit_order_is_the_order_of_first_use() -> None:
    """Units count in forward order even where the module lists them otherwise.

    A unit that is never used comes last.
    """

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            self.first = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()  # type: ignore[no-any-return]

    with graphs_interpreted():
        ours = compile_rewritten(Reversed())
        assert ours.capture.unit_order == (0, 1, 2)
        ours.model(torch.ones(1, 2)).backward()
    assert ours.capture.unit_order == (2, 1, 0)


def test_a_graph_break_makes_two_pairs_that_share_the_tied_weight(interpreted: None) -> None:
    """A parameter tied across a break is offloaded twice in one backward.

    The sum trains to the same bits.
    """
    model, batches = models.broken_gpt()
    ours = assert_trains_alike(model, batches, poison=False)
    tied = ours.names.index("wte.weight")
    rows_of_pairs = [graph.grad_rows for graph in ours.capture.graphs if graph.kind is GraphKind.BACKWARD]
    assert set.intersection(*map(set, rows_of_pairs)) == {tied}
    assert {graph.pair for graph in ours.capture.graphs} == {0, 1}
    assert ours.nodes.count("grad_offload") == {row: len(batches) * (2 if row == tied else 1) for row in range(len(ours.names))}
    assert len(ours.nodes.ended) == 2 * len(batches)


def test_a_new_shape_is_a_new_pair_with_the_same_rows(interpreted: None) -> None:
    """A recompile for dynamic shapes is rewritten again, and the training stays the same."""
    model, _ = models.gpt(layers=1)
    batches = [(torch.randint(0, models.VOCABULARY, (2, length)),) for length in (6, 5, 7)]
    ours = assert_trains_alike(model, batches)
    backward = [graph for graph in ours.capture.graphs if graph.kind is GraphKind.BACKWARD]
    assert len(backward) == 2
    assert backward[0].grad_rows == backward[1].grad_rows == tuple(range(len(ours.names)))
    assert backward[0].pair != backward[1].pair


def test_an_inference_graph_waits(interpreted: None) -> None:
    """Under no_grad an inference graph waits for every weight and sees the new ones."""
    model, batches = models.gpt(layers=1)
    plain = copy.deepcopy(model)
    ours = compile_rewritten(model)
    train(ours.model, batches, ours.nodes.step)
    plain.compile()
    train(plain, batches)
    with torch.no_grad():
        assert torch.equal(ours.model(*batches[0]), plain(*batches[0]))
    assert ours.capture.graphs[-1].kind is GraphKind.INFERENCE


def test_a_hooked_parameter_keeps_its_gradient(interpreted: None) -> None:
    """A gradient with a tensor hook or a post-accumulate hook arrives in `.grad`.

    The hook sees it, and the other rows are offloaded.
    """
    model, batches = models.mlp()
    seen: list[str] = []
    first, last = model.get_parameter("first.weight"), model.get_parameter("last.weight")
    first.register_hook(lambda grad: seen.append("tensor"))
    last.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    ours = compile_rewritten(model)
    model(*batches[0]).backward()
    hooked = {ours.names.index("first.weight"), ours.names.index("last.weight")}
    assert sorted(seen) == ["accumulated", "tensor"]
    assert {row for row, p in enumerate(model.parameters()) if p.grad is not None} == hooked
    assert set(ours.nodes.count("grad_offload")) == set(range(len(ours.names))) - hooked
    assert set(ours.capture.graphs[1].kept_grads) == hooked
    released = set(ours.nodes.count("release")) | set(ours.nodes.count("backward_end"))
    assert released == set(range(len(ours.names))) - {ours.names.index("first.weight")}  # which this backward does not read


def test_own_hooks_are_no_user_hooks() -> None:
    """A hook whose function is this package's own does not keep the gradient."""
    parameter = nn.Parameter(torch.ones(1))

    def own(_: torch.Tensor) -> None: ...

    own.__module__ = "hytrain_fx.session.session"
    parameter.register_post_accumulate_grad_hook(own)
    assert not has_user_hooks(parameter)
    own.__module__ = "hytrain_fx_of_a_user"
    assert has_user_hooks(parameter)


def test_flops_agree_with_torch() -> None:
    """The units' FLOPs add up to FlopCounterMode's count in eager, forward and backward."""
    model, batches = models.cnn()
    captured, units = capture_only(copy.deepcopy(model), batches[0])
    unit_of = {row: unit.number for unit in units for row in unit.rows}
    from hytrain_fx.capture.captured_graph import unit_flops

    forward, backward = (unit_flops(graph, unit_of) for graph in captured)
    with FlopCounterMode(display=False) as counter:
        loss = model(*batches[0])
    assert sum(forward.values()) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert sum(backward.values()) == counter.get_total_flops()
    linear = next(unit.number for unit in units if unit.name == "head")
    assert forward[linear] == 2 * 2 * 4 * 3


def test_cuda_graphs_are_refused(interpreted: None) -> None:
    """Options that turn CUDA graphs on are refused while compiling, with what to use instead."""
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        model, batches = models.mlp()
        compile_rewritten(model, **options)
        with pytest.raises(UnsupportedError, match="CUDA graphs are on"), _bare_errors():
            model(*batches[0])


def test_options_reach_inductor() -> None:
    """Options and modes hold while the forward and the lazily compiled backward are compiled."""
    seen: list[int] = []

    def note(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(torch._inductor.config.max_fusion_size)
        return interpret(graph, inputs, **kwargs)

    with graphs_interpreted(), pytest.MonkeyPatch.context() as patch:
        interpret = compiling.compile_fx_inner
        patch.setattr(compiling, "compile_fx_inner", note)
        model, batches = models.mlp()
        compile_rewritten(model, options={"max_fusion_size": 7})
        model(*batches[0]).backward()
    assert seen == [7, 7]


def test_a_backward_without_descriptors_is_refused(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture stops, and does not guess, where AOTAutograd does not say which output is which."""
    gradients = Capture._gradients

    def forget(self: Capture[Any], module: Any, pair: Any) -> Any:
        del module.graph.output_node().meta["desc"]
        return gradients(self, module, pair)

    monkeypatch.setattr(Capture, "_gradients", forget)
    model, batches = models.mlp()
    compile_rewritten(model)
    with pytest.raises(CaptureError, match="does not say which output is which gradient"), _bare_errors():
        model(*batches[0]).backward()


def test_names_must_fit_parameters() -> None:
    """There must be as many names as parameters."""
    with pytest.raises(CaptureError, match="1 names for 0 parameters"):
        Capture(("a",), (), (), lambda graph: None)


@pytest.mark.parametrize("cured", [True, False])
def test_a_cached_plain_compile_does_not_hide_the_rewrite(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutogradCache gives out the graphs of a plain compile without asking us.

    Kept out, it does not.
    """
    model, batches = models.mlp()
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=True):
        plain.compile(options=graph_order_kept())  # the cache goes by options too
        plain(*batches[0]).backward()
        if not cured:
            monkeypatch.setattr(compiling, "autograd_cache_off", contextlib.nullcontext)
        ours = compile_rewritten(model)
        model(*batches[0]).backward()
    rewritten = [graph.kind for graph in ours.capture.graphs]
    assert rewritten == ([GraphKind.FORWARD, GraphKind.BACKWARD] if cured else [])
    assert all((p.grad is None) is cured for p in model.parameters())


@contextlib.contextmanager
def _bare_errors() -> Iterator[None]:
    """Raise what a backend raised, without Dynamo's wrapping."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from error


@pytest.mark.parametrize("known", [True, False])
def test_saved_views_of_weights_are_readers_too(known: bool, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved view of a weight is a reader: if missed, the weight is released while it is read.

    A partitioner may save a view instead of the weight.
    """

    def keep_all(gm: Any, inputs: Any, *, compiler: str = "", **kwargs: Any) -> Any:
        return torch._functorch.partitioners.default_partition(gm, inputs, **kwargs)

    monkeypatch.setattr(torch._inductor.compile_fx, "min_cut_rematerialization_partition", keep_all)
    if not known:
        monkeypatch.setattr(hytrain_fx.capture.backend, "saved_views", lambda graph: {})
    model, batches = models.mlp()
    if known:
        ours = assert_trains_alike(model, batches)
        assert [len(graph.views) for graph in ours.captured] == [0, 3]
    else:
        with pytest.raises(AssertionError):
            assert_trains_alike(model, batches)
