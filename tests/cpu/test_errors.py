"""Every refusal is an early error of this library that says what was found.

Nothing hangs, and nothing is lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.api import session_of
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .loops import plain_loop, weights
from .models import Adapted, Cnn, Mlp, mlp
from .threads import engine_threads, threads_left


class Frozen(nn.Module):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).requires_grad_(False)


class Strided(nn.Module):
    """A parameter with gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters()) or [torch.zeros(1, requires_grad=True)], **options)


def on_two_devices() -> tuple[nn.Module, Any]:
    model = Mlp()
    model.last.to("meta")
    return model, adamw(model)


def on_meta() -> tuple[nn.Module, Any]:
    model = Mlp().to("meta")
    return model, adamw(model)


def with_foreign_parameter() -> tuple[nn.Module, Any]:
    model = Mlp()
    return model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])


def in_float64() -> tuple[nn.Module, Any]:
    model = Mlp().double()
    return model, adamw(model)


def optimizer_of(make: Callable[[], nn.Module], kind: Callable[[Any], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        model = make()
        return model, kind(model)

    return build


REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "empty model": (optimizer_of(nn.Identity, adamw), "no parameters"),
    "nothing trainable": (optimizer_of(Frozen, adamw), "requires grad"),
    "two devices": (on_two_devices, "meta"),
    "no real device": (on_meta, "meta"),
    "foreign parameter": (with_foreign_parameter, r"\(7,\)"),
    "LBFGS": (optimizer_of(Mlp, lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS needs all parameters at once"),
    "no optimizer": (optimizer_of(Mlp, lambda m: None), "NoneType"),
    "no module": (lambda: ((lambda x: x), adamw(Mlp())), "torch.nn.Module"),
    "differentiable": (optimizer_of(Mlp, lambda m: adamw(m, differentiable=True)), "differentiable"),
    "gaps in memory": (optimizer_of(Strided, adamw), "dense"),
    "float64": (in_float64, "float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """compile() raises UnsupportedError that names what it found, and starts no thread."""
    make, message = REFUSED[name]
    model, optimizer = make()
    threads = engine_threads()
    with pytest.raises(errors.UnsupportedError, match=message):
        hytrain_fx.compile(model, optimizer)
    assert threads_left(threads) == []


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"kk": 3}, "'kk'"),
    "k": ({"k": -1}, "k=-1"),
    "planner": ({"planner": "best"}, "planner='best'"),
    "plan": ({"plan": 3}, "plan=3"),
    "gpu_states": ({"gpu_states": 1.5}, "gpu_states=1.5"),
    "host_memory": ({"host_memory": 0}, "host_memory=0"),
    "replan_every": ({"replan_every": -2}, "replan_every=-2"),
    "workers": ({"workers": 0}, "workers=0"),
    "engine": ({"engine": "fast"}, "engine='fast'"),
    "timeout_s": ({"timeout_s": 0}, "timeout_s=0"),
    "mode": ({"mode": "reduce-overhead"}, "reduce-overhead"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_a_config_error(name: str) -> None:
    """The error names the option and what was given."""
    options, message = OPTIONS[name]
    model = Mlp()
    with pytest.raises(errors.ConfigError, match=message):
        hytrain_fx.compile(model, adamw(model), **options)


@pytest.mark.parametrize("k", [0, 1])
def test_too_little_host_memory_is_known_before_anything_is_allocated(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that do not fit raise HostMemoryError with both figures; no slab has been made."""
    from hytrain_fx.runtime.states import unit_slabs

    def no_slab(nbytes: int) -> None:
        raise AssertionError("a slab was allocated")

    monkeypatch.setattr(unit_slabs, "HostSlab", no_slab)
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))
    with pytest.raises(errors.HostMemoryError, match=r"need (48048384|32032256) bytes, and host_memory allows 4096 bytes"):
        hytrain_fx.compile(model, adamw(model), k=k, host_memory=4096)


def test_a_refused_compile_leaves_no_thread() -> None:
    """A compile() that raises stops what it had started."""
    model = Mlp()
    threads = engine_threads()
    with pytest.raises(errors.HostMemoryError):
        hytrain_fx.compile(model, adamw(model), k=0, host_memory=1)
    assert threads_left(threads) == []


def test_a_refused_compile_leaves_model_and_optimizer_plain() -> None:
    """After a HostMemoryError the plain loop works, and so does a second compile().

    The second one has other options.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    optimizer: Any = adamw(model)
    with pytest.raises(errors.HostMemoryError):
        hytrain_fx.compile(model, optimizer, k=0, host_memory=1)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    plain_loop(1)(model, optimizer, batches)
    _, optimizer = hytrain_fx.compile(model, optimizer)
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


def test_a_second_compile_is_refused() -> None:
    """Compiling a model twice, or one that torch compiled, is an error that says what to do."""
    model = Mlp()
    optimizer = adamw(model)
    _, ours = hytrain_fx.compile(model, optimizer)
    with pytest.raises(errors.UnsupportedError, match="close"):
        hytrain_fx.compile(model, optimizer)
    with pytest.raises(errors.UnsupportedError, match="close"):
        hytrain_fx.compile(model, ours)
    hytrain_fx.close(model)
    other = Mlp()
    other.compile()
    with pytest.raises(errors.UnsupportedError, match="compiled"):
        hytrain_fx.compile(other, adamw(other))


@pytest.mark.parametrize("given", [None, 3, "model", nn.Linear, nn.Linear(2, 2), torch.zeros(2), print], ids=lambda of: type(of).__name__)
@pytest.mark.parametrize("function", ["close", "explain", "inspect", "record", "settle"])
def test_what_is_no_compiled_model_is_refused_by_name(function: str, given: Any) -> None:
    """Every public function says what it was given."""

    def call() -> None:
        called = getattr(hytrain_fx, function)(given)
        called.__enter__()  # of record, which looks when the block begins

    with pytest.raises(errors.UnsupportedError, match=f"this {type(given).__name__} is not compiled"):
        call()


def test_a_wrapper_around_a_compiled_model_is_refused_by_name() -> None:
    """A wrapper around a compiled model is refused: its parameters belong to a session."""
    model = Mlp()
    hytrain_fx.compile(model, adamw(model))
    wrappers: list[Any] = [torch.compile(model), nn.Sequential(model)]
    for wrapped in wrappers:
        with pytest.raises(errors.UnsupportedError, match=r"first\.weight is a parameter of another model.*close"):
            hytrain_fx.compile(wrapped, adamw(wrapped))
    hytrain_fx.close(model)


def test_a_second_model_with_the_optimizer_of_the_first_is_refused() -> None:
    """An optimizer that is taken over already belongs to one model."""
    first, second = Mlp(), Mlp()
    _, ours = hytrain_fx.compile(first, adamw(first))
    assert isinstance(ours, OffloadedOptimizer)
    with pytest.raises(errors.UnsupportedError):
        hytrain_fx.compile(second, ours)
    hytrain_fx.close(first)


class Looked(nn.Module):
    """An embedding with sparse gradients, read in a graph or ahead of one."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.table, self.head, self.eager = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1), eager

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        if self.eager:
            torch._dynamo.graph_break()
        return self.head(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_sparse_gradients_are_refused(eager: bool, k: int) -> None:
    """A sparse gradient is an error at backward() or step() that names the parameter.

    Its update is not silently left out.
    """
    torch._dynamo.reset()
    model = Looked(eager)
    _, optimizer = hytrain_fx.compile(model, adamw(model), k=k)

    def step() -> None:
        model(torch.tensor([1, 2, 3])).backward()
        optimizer.step()

    with pytest.raises(errors.UnsupportedError, match=r"table\.weight is sparse"):
        step()
    optimizer.zero_grad()
    hytrain_fx.close(model)


def test_nan_inputs_train_as_in_torch_and_are_seen() -> None:
    """A NaN in a batch makes a NaN loss, as in plain torch.

    clip_grad_norm_(error_if_nonfinite=True) refuses it before the step.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, adamw(model))
    plain_loop(1)(model, optimizer, batches)
    before = weights(model)
    loss = model(torch.full((5, 6), float("nan")))
    loss.backward()
    assert loss.isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    hytrain_fx.close(model)


def test_a_group_added_after_compile_is_refused() -> None:
    """add_param_group and unfreezing a parameter later are errors that say to compile again.

    Both the old and the new optimizer refuse a new group.
    """
    torch._dynamo.reset()
    model = Adapted()
    old = torch.optim.AdamW(model.parameters())
    _, optimizer = hytrain_fx.compile(model, old)
    for each in (old, optimizer):
        with pytest.raises(errors.UnsupportedError, match="compile"):
            each.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    model.base.requires_grad_(True)
    model(torch.randn(2, 6)).backward()
    with pytest.raises(errors.UnsupportedError, match="compile again"):
        optimizer.step()
    hytrain_fx.close(model)


def test_an_optimizer_that_was_wrapped_before_compile_is_refused() -> None:
    """An optimizer that wraps another is refused by name.

    A `step` that the wrapper took before compile() is an error too, so it does not train in
    silence.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.old_step, self.state, self.param_groups = optimizer.step, optimizer.state, optimizer.param_groups

    torch._dynamo.reset()
    model = Mlp()
    wrapper = Wrapper(adamw(model))
    with pytest.raises(errors.UnsupportedError, match=r"Wrapper.*compile first"):
        hytrain_fx.compile(model, wrapper)
    hytrain_fx.compile(model, wrapper.optimizer)
    model(torch.randn(5, 6)).backward()
    with pytest.raises(errors.UnsupportedError, match=r"before hytrain_fx\.compile"):
        wrapper.old_step()
    wrapper.optimizer.step()  # the method as it is after compile()
    assert hytrain_fx.explain(model).steps_done == 1
    hytrain_fx.close(model)


def test_a_closed_model_is_plain_and_its_optimizer_says_so() -> None:
    """After close() a step of the taken-over optimizer is an error, and so are lookups.

    Closing twice is an error of its own.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, adamw(model))
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)
    model(*batches[0]).backward()
    with pytest.raises(errors.HytrainError, match="closed"):
        optimizer.step()
    with pytest.raises(errors.UnsupportedError, match="not compiled"):
        hytrain_fx.close(model)
    with pytest.raises(errors.UnsupportedError, match="not compiled"):
        session_of(model)


@pytest.mark.parametrize("gate", ["forward", "read", "state_dict", "close"])
def test_a_worker_that_fails_raises_at_the_next_gate(gate: str) -> None:
    """A worker's failure is raised at the next gate, with its cause, and nothing hangs.

    Gates are the forward, a weight read, a checkpoint and close.
    """
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, adamw(model), k=0, timeout_s=20.0)
    plain_loop(1)(model, optimizer, batches)
    model(*batches[0]).backward()
    session_of(model).engine.fail_next_update(0)
    optimizer.step()
    gates: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(*batches[0]),
        "read": lambda: model.first.weight.sum(),
        "state_dict": lambda: optimizer.state_dict(),
        "close": lambda: hytrain_fx.close(model),
    }
    with pytest.raises(errors.EngineError, match="injected failure"):
        gates[gate]()
    if gate != "close":
        with pytest.raises(errors.EngineError, match="injected failure"):
            hytrain_fx.close(model)


def test_buffers_and_frozen_parts_need_nothing() -> None:
    """A model with running statistics compiles although its buffers are no parameters."""
    model = Cnn()
    hytrain_fx.compile(model, adamw(model))
    hytrain_fx.close(model)
