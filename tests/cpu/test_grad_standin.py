"""Stand-in gradients: what needs no values, what brings them back, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

from hytrain_fx.errors import EngineError, GradientConsumedError, UnsupportedError
from hytrain_fx.gradients.standin import GradStandIn

from .held_gradient import DEVICES, DTYPES, KNOWN, HeldGradient, bits, grad_of, gradient, standin_of, stood_in, with_real


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_accepted_as_grad(dtype: torch.dtype) -> None:
    """`p.grad = standin` is accepted, gives the same object back, and can be taken off."""
    parameter = nn.Parameter(gradient(dtype))
    standin = GradStandIn(parameter, HeldGradient(gradient(dtype)))
    parameter.grad = standin
    assert parameter.grad is standin
    parameter.grad = None
    assert parameter.grad is None


def test_metadata_and_repr_need_no_values() -> None:
    """Shape, strides, dtype, device, autograd's fields, hash and repr need no fetch."""
    held = gradient().t()
    parameter, source = stood_in(held)
    grad = standin_of(parameter)
    assert (grad.shape, grad.stride(), grad.dtype, grad.device) == (held.shape, held.stride(), held.dtype, held.device)
    assert (grad.numel(), grad.dim(), grad.size(0), len(grad), grad.layout, grad.nbytes) == (12, 2, 4, 4, torch.strided, 48)
    assert (grad.requires_grad, grad.is_leaf, grad.grad_fn, grad.is_sparse, grad.is_cuda) == (False, True, None, False, False)
    assert "on the host" in repr(grad)
    assert hash(grad) == id(grad)
    assert grad.requires_grad_(False) is grad
    assert (source.fetches, grad.materialized) == (0, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_with_known_norms_brings_nothing_back(dtype: torch.dtype, foreach: bool | None, device: str) -> None:
    """`clip_grad_norm_` reads norms of the form it takes on real gradients, and logs one factor.

    The total norm has the same bits.
    """
    held = [gradient(dtype, device, shape) for shape in ((3, 4), (300, 7))]
    real, mixed = [with_real(h) for h in held], [stood_in(h, KNOWN) for h in held]
    expected = torch.nn.utils.clip_grad_norm_(real, 0.5, foreach=foreach)
    assert bits(torch.nn.utils.clip_grad_norm_([p for p, _ in mixed], 0.5, foreach=foreach)) == bits(expected)
    assert [(s.fetches, s.wanted, len(standin_of(p).factors)) for p, s in mixed] == [(0, [], 1)] * 2
    assert bits([grad_of(p).clone() for p, _ in mixed]) == bits([p.grad for p in real])


def test_an_unknown_norm_is_noted_and_the_standin_stays_clean() -> None:
    """An unknown norm is answered from a fetched copy, and its kind is noted.

    Nothing is kept on the device.
    """
    parameter, source = stood_in(gradient())
    assert bits(torch.nn.utils.clip_grad_norm_([parameter], 1e9)) == bits(torch.linalg.vector_norm(gradient()).reshape(1).norm())
    assert bits(grad_of(parameter).norm(1)) == bits(gradient().norm(1))
    assert source.wanted == [(2.0, True), (1.0, False)]
    assert (source.fetches, standin_of(parameter).materialized) == (2, None)


def test_the_real_tensor_takes_the_place_of_the_standin() -> None:
    """Once values are needed `p.grad` is the real tensor, brought back once.

    Every alias leads to it.
    """
    parameter, source = stood_in(gradient())
    standin, twin = standin_of(parameter), grad_of(parameter).data
    view = standin.view(-1)
    assert parameter.grad is standin.materialized
    view[0] = 5.0
    twin.mul_(2)
    assert standin.add_(1) is standin
    assert bits(parameter.grad) == bits(standin.clone()) == bits(twin.clone())
    assert parameter.grad is not None
    assert parameter.grad[0, 0] == 11.0
    assert source.fetches == 1


def test_a_grad_that_was_replaced_is_left_alone() -> None:
    """Bringing back a stand-in that is no longer `p.grad` does not touch `p.grad`."""
    parameter, _ = stood_in(gradient())
    held = standin_of(parameter)
    parameter.grad = None
    held.abs()
    assert parameter.grad is None


C_READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda g: g.numpy().tolist(),
    "asarray": lambda g: np.asarray(g).tolist(),
    "tolist": lambda g: g.tolist(),
    "item": lambda g: g[0, 0].item(),
    "data_ptr": lambda g: g.data_ptr() != 0,
    "storage": lambda g: g.untyped_storage().tolist(),
    "dlpack": lambda g: bits(torch.utils.dlpack.from_dlpack(g)),
    "tensor": lambda g: bits(torch.tensor(g[0].tolist())),
    "copy construct": lambda g: bits(torch.tensor(g)),
    "deepcopy": lambda g: bits(copy.deepcopy(g)),
    "pickle": lambda g: bits(pickle.loads(pickle.dumps(g))),
    "vmap": lambda g: bits(torch.vmap(lambda row: row.sum())(g)),
    "format": lambda g: f"{g}",
    "cpu": lambda g: bits(g.cpu()),
    "equal": lambda g: torch.equal(g, gradient()),
    "compare": lambda g: bits(g == gradient()),
    "iterate": lambda g: [bits(row) for row in g],
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", C_READS)
def test_reads_that_bypass_the_dispatcher_see_the_values(name: str) -> None:
    """What torch answers in C without dispatching is the same as for a real gradient.

    On a subclass torch would refuse it or get it wrong.
    """
    parameter, _ = stood_in(gradient())
    assert C_READS[name](grad_of(parameter)) == C_READS[name](gradient())


def test_a_saved_gradient_is_a_plain_tensor() -> None:
    """torch.save, deepcopy and pickle write tensors that need nothing of ours to be read."""
    parameter, _ = stood_in(gradient())
    file = io.BytesIO()
    torch.save({"grad": parameter.grad}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["grad"]) is Tensor
    assert type(copy.deepcopy(stood_in(gradient())[0].grad)) is Tensor


def test_a_raw_pointer_is_refused() -> None:
    """C++ that asks a stand-in itself for its memory gets an error, never a null pointer."""
    parameter, _ = stood_in(gradient())
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C._to_dlpack(standin_of(parameter))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError):
        grad_of(parameter).data_ptr()


def test_ops_below_torch_function_work_on_the_real_tensor() -> None:
    """In-place ops and views reach the real gradient where `__torch_function__` is switched off.

    They go through the dispatcher.
    """
    parameter, _ = stood_in(gradient())
    standin = standin_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        assert standin.add_(1) is standin
        standin.view(-1).mul_(2)
        standin.detach()[0].sub_(3)
    expected = gradient().add_(1).mul_(2)
    expected[0].sub_(3)
    assert bits(standin.clone()) == bits(expected)


PREPARATIONS: tuple[Callable[[Tensor], Any], ...] = (lambda g: g, lambda g: g.mul_(0.3), lambda g: g.zero_())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_accumulates_into_it(create_graph: bool) -> None:
    """AccumulateGrad adds to the gradient, in place or out of place.

    That holds after logged factors and into a zeroed gradient too.
    """
    for prepare in PREPARATIONS:
        (parameter, _), real = stood_in(gradient(torch.bfloat16)), with_real(gradient(torch.bfloat16))
        for p in (parameter, real):
            prepare(grad_of(p))
            (p.exp() * 1.7).sum().backward(create_graph=create_graph)
        assert bits(grad_of(parameter).detach().clone()) == bits(grad_of(real).detach())


def test_a_gradient_whose_memory_is_anothers_can_still_be_zeroed() -> None:
    """A consumed gradient raises GradientConsumedError where values are needed.

    Metadata, repr and `zero_grad` do not need them.
    """
    parameter, source = stood_in(gradient(), KNOWN)
    source.live = False
    assert "gone" in repr(parameter.grad)
    with pytest.raises(GradientConsumedError):
        grad_of(parameter).abs()
    with pytest.raises(GradientConsumedError):
        grad_of(parameter).norm(3)
    torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
    assert standin_of(parameter).zeroed
    assert bits(grad_of(parameter).clone()) == bits(torch.zeros(3, 4))


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("known", [(), KNOWN], ids=["unknown norm", "known norm"])
def test_grad_scaler_unscales_and_skips(bad: float | None, known: tuple[tuple[float, bool], ...]) -> None:
    """GradScaler skips the step when it finds an inf or nan, and else steps on unscaled gradients.

    It does not keep them.
    """
    held = [gradient(), gradient(shape=(5,))]
    if bad is not None:
        held[1][3] = bad
    results = []
    for parameters in ([with_real(h) for h in held], [stood_in(h, known)[0] for h in held]):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        kept = [getattr(p.grad, "materialized", None) for p in parameters]
        scaler.step(optimizer)
        scaler.update()
        results.append((bits(parameters), scaler.get_scale(), kept))
    assert results[0] == results[1]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_another_optimizer_steps_from_it(make: Any, kind: dict[str, bool]) -> None:
    """Plain torch optimizers of every implementation take a stand-in as the gradient."""
    results = []
    for parameters in ([with_real(gradient())], [stood_in(gradient())[0]]):
        make(parameters, lr=0.1, **kind).step()
        results.append(bits(parameters))
    assert results[0] == results[1]


COMPILED: dict[str, Callable[[nn.Parameter], Any]] = {
    "reads": lambda p: grad_of(p) * 2 + p,
    "scales": lambda p: (grad_of(p).mul_(3), p.sum())[1],
    "clips": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "takes": lambda p: (lambda g: g.sin() + 1)(grad_of(p)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_gets_the_right_values(name: str) -> None:
    """A user's function under torch.compile that uses `p.grad` gives what eager gives.

    It breaks its graph there.
    """
    torch._dynamo.reset()
    run = torch.compile(COMPILED[name], backend="aot_eager")
    for _ in range(2):
        (parameter, _), real = stood_in(gradient()), with_real(gradient())
        assert bits(run(parameter)) == bits(COMPILED[name](real))
        assert bits(grad_of(parameter).clone()) == bits(real.grad)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(gradient())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_a_compiled_function_may_be_given_one() -> None:
    """A stand-in as an argument of a compiled function is used for its values, call after call."""
    torch._dynamo.reset()
    run = torch.compile(lambda g: g.sin() + 1, backend="aot_eager")
    for _ in range(2):
        assert bits(run(stood_in(gradient())[0].grad)) == bits(gradient().sin() + 1)


def test_a_model_compiles_while_its_gradients_are_stood_in() -> None:
    """A stand-in is neither traced nor brought back while its model compiles.

    Dynamo describes parameters with their `.grad`. The backward then accumulates into it.
    """
    torch._dynamo.reset()
    layer = Linear()
    source = HeldGradient(gradient())
    layer.weight.grad = GradStandIn(layer.weight, source)
    layer.compile(backend="aot_eager", fullgraph=True)
    out = layer(torch.ones(2, 4))
    assert source.fetches == 0
    out.sum().backward()
    assert bits(grad_of(layer.weight).clone()) == bits(gradient() + torch.full((3, 4), 2.0))


def test_a_gradient_read_in_inference_mode_can_be_edited_later() -> None:
    """The tensor that comes back under `inference_mode` is an ordinary one."""
    parameter, _ = stood_in(gradient())
    with torch.inference_mode():
        grad_of(parameter).abs()
    grad_of(parameter).add_(1)
    assert bits(parameter.grad) == bits(gradient() + 1)


def test_a_traced_fetch_is_refused() -> None:
    """A fetch that a tracer's mode turns into no plain tensor does not become the gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    parameter, _ = stood_in(gradient())
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(EngineError, match="FakeTensor"):
        grad_of(parameter).abs()
    assert bits(grad_of(parameter).clone()) == bits(gradient())


def test_it_cannot_require_grad() -> None:
    """Asking a stand-in to require grad is an error that says what to do."""
    parameter, _ = stood_in(gradient())
    with pytest.raises(UnsupportedError, match="clone"):
        grad_of(parameter).requires_grad_()
    with pytest.raises(UnsupportedError, match="clone"):
        grad_of(parameter).requires_grad = True


def test_a_standin_does_not_keep_its_parameter_alive() -> None:
    """A stand-in that outlives its parameter still has its values."""
    parameter, _ = stood_in(gradient())
    standin, alive = standin_of(parameter), weakref.ref(parameter)
    del parameter
    gc.collect()
    assert alive() is None
    assert bits(standin + 0) == bits(gradient() + 0)
