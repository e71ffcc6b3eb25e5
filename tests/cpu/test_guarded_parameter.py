"""Guarded parameters: which accesses are noticed, and that they see the new weight.

Nothing of the guard is left after them.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

from hytrain_fx.errors import EngineError
from hytrain_fx.weights.guard import (
    CountedParameter,
    GuardedParameter,
    PlainWhileRunning,
    guard,
    guard_all,
    guard_type,
    is_guarded,
    touched,
    unguard_all,
)


class Landing:
    """A weight in flight.

    `on_touch` writes the new value and counts, as a session that waits for a copy.
    """

    def __init__(self, *parameters: nn.Parameter) -> None:
        self.touches = 0
        self.value = 1.0
        self.parameters = parameters
        self.guarded = guard_type(self.on_touch)
        self.guard_all()

    def on_touch(self, parameter: nn.Parameter) -> None:
        assert type(parameter) is CountedParameter
        self.touches += 1
        with torch.no_grad():
            parameter.fill_(self.value)

    def guard_all(self, value: float | None = None) -> None:
        self.value = self.value + 1 if value is None else value
        for parameter in self.parameters:
            assert guard(parameter, self.guarded)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def full(value: float) -> Tensor:
    return torch.full((3, 4), value)


READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone().detach(),
    "add": lambda p: (p + 0).detach(),
    "data": lambda p: p.data,
    "linear": lambda p: nn.functional.linear(torch.eye(4), p).t().detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "cat": lambda p: torch.cat([p]).detach(),
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0].detach(),
    "nested keyword": lambda p: torch.stack(tensors=[p])[0].detach(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(3, 4).detach(),
    "index": lambda p: p[:].detach(),
    "iterate": lambda p: torch.stack(list(p)).detach(),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(p.detach()),
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(3, 4),
    "operator": lambda p: torch.ops.aten.add.Tensor(p, 0.0).detach(),
    "operator packet": lambda p: torch.ops.aten.add(p, 0.0).detach(),
    "deepcopy": lambda p: copy.deepcopy(p).data,
    "copy": lambda p: copy.copy(p).data,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).data,
    "out": lambda p: torch.add(p.data, 0, out=torch.zeros(3, 4)),
    "other operand": lambda p: torch.zeros(3, 4).add_(p.detach() * 0).add_(p.detach()),
    "subclass operand": lambda p: torch.zeros(3, 4).copy_(p).detach(),
    "compiled": lambda p: torch.compile(lambda q: q * 1, backend="eager")(p).detach(),
    "functional_call": lambda p: torch.func.functional_call(Net(), {"weight": p}, torch.eye(4)).t().detach(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_sees_the_new_weight(name: str) -> None:
    """A read of a guarded parameter first waits for its weight, once, and gives plain types."""
    parameter = nn.Parameter(torch.zeros(3, 4))
    landing = Landing(parameter)
    for value in (3.0, 5.0):
        landing.touches = 0
        landing.guard_all(value)
        with torch.no_grad():
            seen = READS[name](parameter)
        assert torch.equal(seen, full(value))
        assert type(seen) is Tensor
        assert type(parameter) is CountedParameter
        assert landing.touches == 1


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda p: p.copy_(full(9.0)),
    "fill_": lambda p: p.fill_(9.0),
    "data set": lambda p: setattr(p, "data", full(9.0)),
    "data copy": lambda p: p.data.copy_(full(9.0)),
    "setitem": lambda p: p.__setitem__(slice(None), 9.0),
    "foreach": lambda p: torch._foreach_copy_([p], [full(9.0)]),
    "out": lambda p: torch.add(full(4.0), 5.0, out=p),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.full((12,), 9.0), [p]),
    "init": lambda p: nn.init.constant_(p, 9.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_comes_after_the_new_weight(name: str) -> None:
    """A write comes after the weight in flight has landed, and is not overwritten by it."""
    parameter = nn.Parameter(torch.zeros(3, 4))
    landing = Landing(parameter)
    with torch.no_grad():
        WRITES[name](parameter)
    assert landing.touches == 1
    assert torch.equal(parameter.detach(), full(9.0))


def test_writes_through_data_are_counted() -> None:
    """`.data` shares memory and version counter with a guarded or touched parameter.

    A result that is kept goes on counting.
    """
    parameter = nn.Parameter(torch.zeros(3, 4))
    landing = Landing(parameter)
    kept = parameter.data
    version = parameter._version
    kept.add_(1.0)
    parameter.data.mul_(2.0)
    unguard_all([parameter])
    kept.add_(1.0)
    assert (parameter._version - version, landing.touches, type(kept), kept.requires_grad) == (3, 1, Tensor, False)
    assert torch.equal(parameter.detach(), full(7.0))


@pytest.mark.parametrize("touch", [lambda p: p, lambda p: p.sum()], ids=["guarded", "touched"])
def test_copies_and_texts_are_those_of_a_plain_parameter(touch: Callable[[nn.Parameter], Any]) -> None:
    """deepcopy, pickle and repr of a guarded or touched parameter name no class of ours.

    They leave the parameter's own class alone.
    """
    parameter = nn.Parameter(torch.ones(2))
    Landing(parameter).guard_all(1.0)
    touch(parameter)
    assert type(copy.deepcopy(parameter)) is type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    assert repr(parameter) == repr(nn.Parameter(torch.ones(2)))
    assert type(parameter) is CountedParameter
    compiled = torch.compile(lambda p: p * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(parameter).detach(), torch.full((2,), 2.0))


def test_metadata_gradients_and_hooks_do_not_touch() -> None:
    """Metadata, gradients, hooks, hash and optimizer bookkeeping leave the weight in flight."""
    parameter = nn.Parameter(torch.zeros(3, 4))
    landing = Landing(parameter)
    assert (parameter.shape, parameter.dtype, parameter.device, parameter.numel()) == ((3, 4), torch.float32, torch.device("cpu"), 12)
    assert (parameter.size(0), parameter.dim(), parameter.is_cuda, parameter.is_leaf, len(parameter)) == (3, 2, False, True, 3)
    parameter.grad = torch.ones(3, 4)
    assert torch.equal(parameter.grad, torch.ones(3, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    del parameter.grad
    parameter.requires_grad_(False)
    parameter.requires_grad = True
    parameter.register_hook(lambda grad: grad)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert {parameter: 1}[parameter] == 1
    assert isinstance(parameter, nn.Parameter)
    assert (landing.touches, is_guarded(parameter)) == (0, True)


def test_every_guarded_parameter_in_a_call_is_touched_once() -> None:
    """Each guarded parameter found in lists, dicts and keywords is waited for before the op runs.

    Other parameters stay guarded.
    """
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    landing = Landing(*parameters)
    torch.addcmul(parameters[0], parameters[1], value=1.0, tensor2=parameters[2])
    assert landing.touches == 3
    assert [is_guarded(p) for p in parameters] == [False, False, False, True]


def test_two_models_in_one_call_each_wait_for_their_own() -> None:
    """Parameters guarded for different models call their own on_touch."""
    first, second = Landing(nn.Parameter(torch.zeros(3))), Landing(nn.Parameter(torch.zeros(3)))
    first.value, second.value = 2.0, 5.0
    assert torch.equal((first.parameters[0] + second.parameters[0]).detach(), torch.full((3,), 7.0))
    assert (first.touches, second.touches) == (1, 1)


def test_an_error_while_waiting_keeps_the_guard() -> None:
    """What on_touch raises reaches the caller, and the next access raises again.

    An old weight is never read.
    """

    def fail(parameter: nn.Parameter) -> None:
        raise EngineError("the copy of the weight failed")

    parameter = nn.Parameter(torch.zeros(3))
    guard(parameter, guard_type(fail))
    for _ in range(2):
        with pytest.raises(EngineError, match="failed"):
            parameter.sum()
    assert is_guarded(parameter)
    unguard_all([parameter])
    assert type(parameter) is nn.Parameter


def test_a_subclass_of_parameter_is_refused() -> None:
    """guard returns False and changes nothing for types that are not exactly nn.Parameter."""

    class Own(nn.Parameter):
        pass

    guarded = guard_type(lambda p: None)
    for tensor in (Own(torch.zeros(2)), torch.zeros(2), nn.parameter.UninitializedParameter()):
        kind = type(tensor)
        assert not guard(tensor, guarded)
        unguard_all([tensor])
        assert type(tensor) is kind


def test_unguarding_does_not_touch_and_touched_does() -> None:
    """unguard_all takes the class off silently.

    `touched` waits, and does nothing to a plain parameter.
    """
    parameter = nn.Parameter(torch.zeros(3))
    landing = Landing(parameter)
    unguard_all([parameter])
    assert touched(parameter) is parameter
    assert landing.touches == 0
    landing.guard_all()
    assert touched(parameter) is parameter
    assert landing.touches == 1


def test_modules_save_load_and_copy_plain_parameters() -> None:
    """Saving, loading and copying a module see new weights and give nothing that is guarded."""
    net = Net()
    landing = Landing(*net.parameters())
    state = net.state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    assert torch.equal(state["weight"], full(2.0))
    landing.guard_all(4.0)
    twin = copy.deepcopy(net)
    landing.guard_all(5.0)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for module, value in ((twin, 4.0), (loaded, 5.0)):
        assert [type(p) for p in module.parameters()] == [nn.Parameter, nn.Parameter]
        assert torch.equal(module.weight.detach(), full(value))
    landing.guard_all()
    assert b"hytrain_fx" not in pickle.dumps(net)
    landing.guard_all(6.0)
    assert "6." in repr(net.weight)
    landing.guard_all(7.0)
    net.load_state_dict({"weight": full(8.0), "bias": torch.zeros(3)})
    assert torch.equal(net.weight.detach(), full(8.0))


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float64), lambda m: m.half()], ids=["to", "half"])
def test_converting_a_module_keeps_objects_and_values(convert: Callable[[nn.Module], nn.Module]) -> None:
    """Module.to and half swap the data of the same parameters, which are plain then.

    They use the weight that was in flight.
    """
    net = Net()
    before = list(net.parameters())
    landing = Landing(*before)
    landing.guard_all(3.0)
    convert(net)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert torch.equal(net.weight.detach().float(), full(3.0))


def test_an_averaged_model_follows_the_weights() -> None:
    """AveragedModel copies and updates from the weights that were in flight."""
    net = Net()
    landing = Landing(*net.parameters())
    landing.guard_all(2.0)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(net)
    landing.guard_all(4.0)
    averaged.update_parameters(net)
    assert torch.equal(averaged.state_dict()["module.weight"], full(3.0))
    assert {type(p) for p in averaged.parameters()} == {nn.Parameter}


def test_identity_groups_hooks_and_references_survive() -> None:
    """Guarding and unguarding change neither the object, its attributes, hooks nor weak references.

    Its place in param_groups stays too.
    """
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fired: list[str] = []
    net.weight.register_hook(lambda grad: fired.append("hook"))
    net.weight.register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    net.weight.tag = "mine"  # type: ignore[attr-defined]
    reference, identity = weakref.ref(net.weight), id(net.weight)
    landing = Landing(*net.parameters())
    unguard_all([net.weight])
    landing.guard_all()
    gc.collect()
    assert reference() is net.weight is optimizer.param_groups[0]["params"][0]
    assert (id(net.weight), net.weight.tag) == (identity, "mine")
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert fired == ["hook", "post"]
    assert torch.equal(net.weight.detach(), full(3.0) - 0.1)


def test_a_backward_accumulates_into_a_guarded_parameter() -> None:
    """The backward writes `.grad` of a parameter guarded after its forward, without touching it."""
    net = Net()
    loss = net(torch.ones(1, 4)).sum()
    landing = Landing(*net.parameters())
    loss.backward()
    assert landing.touches == 0
    assert net.weight.grad is not None
    assert torch.equal(net.weight.grad, torch.ones(3, 4))


def test_the_class_goes_with_its_model() -> None:
    """A model's guard type is freed once nothing uses it; the parameters stay plain and usable."""
    parameter = nn.Parameter(torch.zeros(3))
    landing = Landing(parameter)
    unguard_all([parameter])
    freed = weakref.ref(landing.guarded)
    assert issubclass(landing.guarded, GuardedParameter)
    del landing
    gc.collect()
    assert freed() is None


def test_a_compiled_module_sees_one_graph_over_guard_cycles() -> None:
    """A compiled module that is unguarded at entry is captured once, without breaks or recompiles.

    It is guarded again afterwards.
    """
    torch._dynamo.reset()
    net = Net()
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    net.compile(backend=backend, fullgraph=True)
    landing = Landing(*net.parameters())
    for _ in range(4):
        for parameter in net.parameters():
            unguard_all([parameter])
        net(torch.ones(2, 4)).sum().backward()
        landing.guard_all()
    assert (len(graphs), landing.touches) == (1, 0)


def test_another_compiled_function_sees_the_new_weight() -> None:
    """A function under torch.compile reads the weights that were in flight, every time.

    It is given guarded parameters, or a module with them.
    """
    torch._dynamo.reset()
    net = Net()
    landing = Landing(*net.parameters())
    doubled = torch.compile(lambda p: p * 2, backend="eager")
    compiled = torch.compile(net, backend="eager")
    for value in (1.0, 2.0, 3.0):
        landing.guard_all(value)
        assert torch.equal(doubled(net.weight), full(2 * value))
        landing.guard_all(value)
        assert torch.equal(compiled(torch.ones(1, 4)).detach(), torch.full((1, 3), 5 * value))


def test_what_no_torch_function_sees_is_not_noticed() -> None:
    """An alias taken before guarding reads and writes the memory directly.

    This is the limit that the module's docstring states.
    """
    parameter = nn.Parameter(torch.zeros(3, 4))
    alias = parameter.data
    landing = Landing(parameter)
    alias.add_(1)
    assert (landing.touches, is_guarded(parameter)) == (0, True)
    assert torch.equal(alias, full(1.0))


def test_wrapping_a_guarded_parameter_is_loud() -> None:
    """`nn.Parameter(p)` raises torch's error, because it compares types around its detach.

    With the data, or a second time, it works.
    """
    parameter = nn.Parameter(torch.zeros(3, 4))
    landing = Landing(parameter)
    with pytest.raises(RuntimeError, match="Creating a Parameter"):
        nn.Parameter(parameter)
    landing.guard_all(6.0)
    assert torch.equal(nn.Parameter(parameter.data).detach(), full(6.0))


def test_a_run_makes_only_what_it_reads_plain() -> None:
    """Others stay guarded meanwhile, and what eager code has touched is guarded again."""
    read, other, seen = parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    reached: list[nn.Parameter] = []
    plain = PlainWhileRunning(parameters, guard_type(reached.append), lambda: reached)
    plain.guard()
    seen.sum()
    assert type(seen) is CountedParameter
    with plain.while_running([read]):
        assert type(read) is nn.Parameter
        assert is_guarded(other)
        with plain.while_running([other]):
            assert type(other) is nn.Parameter
        assert not is_guarded(other)  # one is still running
        read.sum()
    assert all(map(is_guarded, parameters))
    assert reached == [seen]
    plain.begin()
    assert [type(parameter) for parameter in parameters] == [nn.Parameter] * 3
    plain.end()
    assert all(map(is_guarded, parameters))


LAYER = partial(nn.TransformerEncoderLayer, 16, 4, 32, batch_first=True)
FAST: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "encoder": (lambda: nn.TransformerEncoder(LAYER(), 2), lambda m, x, mask: m(x, src_key_padding_mask=mask)),
    "layer": (LAYER, lambda m, x, mask: m(x, src_key_padding_mask=mask)),
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda m, x, mask: m(x, x, x, key_padding_mask=mask)[0]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_modules_go_their_fast_way(name: str, stays: bool) -> None:
    """An evaluation of a module that has a fast operator has its bits: zeros where words are
    missing. Each weight is touched before.
    """
    make, run = FAST[name]
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(2, 5, 16)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    reached = set[int]()
    guarded = guard_type(lambda parameter: reached.add(id(parameter)), stays=lambda _: stays)
    with torch.no_grad():
        expected = run(module, x, mask)
        guard_all(module.parameters(), guarded)
        found = run(module, x, mask)
    assert torch.equal(found, expected)
    assert reached == set(map(id, module.parameters()))
