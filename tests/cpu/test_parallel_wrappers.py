"""A model that is spread over processes or devices is refused at `compile`.

The error names it and the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

import hytrain_fx
from hytrain_fx import errors

from .loops import HYPER, HandAdam, plain_loop, weights
from .models import Batches, mlp
from .test_errors import adamw
from .threads import engine_threads, threads_left


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group that has this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seeded_mlp() -> tuple[nn.Module, Batches]:
    torch.manual_seed(0)
    return mlp()


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def split_by_columns(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (1,)), ColwiseParallel())


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DistributedDataParallel": (DistributedDataParallel, r"{} is a DistributedDataParallel; expected .* one device.*\({}\.module\)"),
    "DataParallel": (DataParallel, r"{} is a DataParallel; expected .* one device.*\({}\.module\)"),
    "FSDP": (flat, r"{} is a FullyShardedDataParallel; expected .* one device.*before"),
    "fully_shard": (sharded, r"{} was sharded by fully_shard\(\); expected .* one device.*before"),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("inside", [False, True], ids=["model", "submodule"])
def test_a_wrapped_model_is_refused(name: str, inside: bool) -> None:
    """The error says where and what it is, what is expected, and two ways out; no thread starts.

    The ways out are the module to hand over, and plain torch.compile.
    """
    wrap, message = WRAPPED[name]
    wrapped = wrap(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), wrapped) if inside else wrapped
    threads = engine_threads()
    where = r"model\.1" if inside else "model"
    with pytest.raises(errors.UnsupportedError, match=f"^{message.replace('{}', where)}.*torch.compile"):
        hytrain_fx.compile(model, adamw(model))
    assert threads_left(threads) == []


def test_a_parameter_that_is_split_is_refused() -> None:
    """Tensor parallelism keeps the modules, but their parameters are DTensors, trained or not."""
    model = nn.Sequential(nn.Linear(4, 4), split_by_columns(nn.Linear(4, 4).requires_grad_(False)))
    with pytest.raises(errors.UnsupportedError, match=r"^model\.1\.weight is a DTensor; expected .* one device.*torch.compile"):
        hytrain_fx.compile(model, adamw(model[0]))


def test_the_module_inside_trains_as_the_message_says() -> None:
    """After the refusal `compile(model.module, optimizer)` has the bits of the plain loop.

    That is a loop on a model compiled by torch.
    """
    torch._dynamo.reset()
    (plain, batches), (model, _) = seeded_mlp(), seeded_mlp()
    plain.compile()
    plain_loop(3)(plain, HandAdam(plain.parameters(), **HYPER), batches)
    wrapped: Any = DistributedDataParallel(model)
    optimizer = adamw(wrapped, **HYPER)
    with pytest.raises(errors.UnsupportedError):
        hytrain_fx.compile(wrapped, optimizer)
    ours: Any
    _, ours = hytrain_fx.compile(wrapped.module, optimizer)
    plain_loop(3)(model, ours, batches)
    hytrain_fx.close(model)
    assert all(torch.equal(weight, weights(model)[name]) for name, weight in weights(plain).items())
