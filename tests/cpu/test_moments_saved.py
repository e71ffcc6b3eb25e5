"""Moments in bf16: checkpoints of every kind, and the options `moments` and `moments_seed`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import ConfigError, HytrainWarning, UnsupportedError
from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.lion import Lion

from .loops import HYPER, assert_same, weights
from .models import Batches
from .saved import start, through_a_file

BF16: dict[str, Any] = {"moments": "bf16"}


@contextmanager
def told(*starts: str) -> Iterator[None]:
    """Inside, these warnings are given, each once, and no others; all are of this file's lines."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    ours = [one for one in found if issubclass(one.category, HytrainWarning)]
    assert len(ours) == len(starts)
    for one, text in zip(ours, starts, strict=True):
        assert str(one.message).startswith(text)
        assert one.filename == __file__


def trained(steps: int, batches: Batches, model: Any, optimizer: Any) -> None:
    for step in range(steps):
        model(*batches[step % 3]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **options)[1]


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped() -> None:
    """A file holds bf16 moments and says so; the seed comes along, the chance of a step too."""
    model, batches = start(torch.bfloat16)
    first = compiled(model, k=0, moments="bf16")
    first.param_groups[0]["moments_seed"] = 5
    trained(3, batches, model, first)
    saved = through_a_file(model.state_dict(), first.state_dict())
    trained(3, batches, model, first)
    expected = weights(model)
    hytrain_fx.close(model)
    assert saved[1]["state"][0]["exp_avg"].dtype == saved[1]["state"][0]["exp_avg_sq"].dtype == torch.bfloat16
    assert saved[1]["param_groups"][0]["moments"] == "bf16"
    model, _ = start(torch.bfloat16, seed=1)
    second = compiled(model, gpu_states=1.0, moments="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HytrainWarning)
        model.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
    trained(3, batches, model, second)
    assert_same(weights(model), expected)
    hytrain_fx.close(model)


def test_fp32_moments_are_rounded_when_they_are_loaded_and_bf16_ones_are_not() -> None:
    """With a warning; the other way no bit is lost, and nothing is said."""
    model, batches = start(torch.bfloat16)
    wide = compiled(model, k=0)
    trained(3, batches, model, wide)
    states = through_a_file(wide.state_dict())[0]
    hytrain_fx.close(model)
    model, _ = start(torch.bfloat16)
    thin = compiled(model, k=0, moments="bf16")
    with pytest.warns(HytrainWarning, match="rounded to nearest"):
        thin.load_state_dict(states)
    found = through_a_file(thin.state_dict())[0]
    for number, entry in states["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["state"][number][name], entry[name].bfloat16())
        assert torch.equal(found["state"][number]["master"], entry["master"])
    hytrain_fx.close(model)
    model, _ = start(torch.bfloat16)
    wide = compiled(model, k=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HytrainWarning)
        wide.load_state_dict(found)
    again = wide.state_dict()
    for number, entry in found["state"].items():
        assert torch.equal(again["state"][number]["exp_avg"], entry["exp_avg"].float())
    assert again["param_groups"][0].get("moments", "fp32") == "fp32"
    hytrain_fx.close(model)


def test_states_take_half_and_explain_says_so() -> None:
    """8 bytes a parameter with the master; the plan's text names them."""
    assert ADAMW.under(BF16).bytes_per_param == 8
    model, batches = start(torch.bfloat16)
    optimizer = compiled(model, k=0, moments="bf16")
    trained(1, batches, model, optimizer)
    assert "moments in bf16" in " ".join(hytrain_fx.explain(model).details().split())
    session = session_of(model)
    params = sum(p.numel() for p in model.parameters())
    in_use = session.resources.in_use()
    assert in_use.estimate is not None
    assert in_use.host_bytes == in_use.estimate.host_bytes < 12 * params + 64 * 6 * len(session.table)
    hytrain_fx.close(model)


def test_options_that_cannot_be_are_refused() -> None:
    """Other values, amsgrad, and optimizers without a kernel."""
    model, _ = start()
    with pytest.raises(ConfigError, match="moments='fp8'"):
        compiled(model, moments="fp8")
    for optimizer, options, text in (
        (torch.optim.AdamW(model.parameters(), amsgrad=True, **HYPER), BF16, "amsgrad=True with moments"),
        (torch.optim.SGD(model.parameters(), lr=1e-2), BF16, "that is for AdamW, Adam, Lion"),
        (torch.optim.SGD([{"params": list(model.parameters()), **BF16}], lr=1e-2), {}, "moments='bf16' with SGD: that is for AdamW"),
        (Lion([{"params": list(model.parameters()), "moments": 16}]), {}, 'expected "fp32" or "bf16"'),
        (Lion([{"params": list(model.parameters()), **BF16, "moments_seed": "x"}]), {}, "moments_seed of a parameter group is 'x'"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            hytrain_fx.compile(model, optimizer, **options)


@pytest.mark.parametrize(("option", "value"), [("moments", "bf16"), ("amsgrad", True)])
def test_which_states_are_kept_does_not_change_in_mid_run(option: str, value: object) -> None:
    """A step with another choice is refused, and goes through once it is set back."""
    model, batches = start()
    optimizer = compiled(model, k=0)
    group = optimizer.param_groups[0]
    trained(1, batches, model, optimizer)
    before = dict(group)
    group[option] = value
    with pytest.raises(UnsupportedError, match="fixed by compile"):
        trained(1, batches, model, optimizer)
    group.clear()
    group.update(before)
    optimizer.step()
    hytrain_fx.close(model)


def test_who_loads_is_warned_once_and_before_anything_is_written() -> None:
    """Of fp16 moments too, in every way to load; a warning that is an error changes nothing."""
    model, batches = start(torch.float16)
    plain = torch.optim.AdamW(model.parameters(), eps=1e-3, **HYPER)  # the usual eps is 0 in fp16
    trained(2, batches, model, plain)
    halves = copy.deepcopy(plain.state_dict())
    with told("the checkpoint has moments in float16"):
        optimizer = hytrain_fx.compile(model, plain, k=0, **BF16)[1]
    with told("the checkpoint has moments in float16"):
        optimizer.load_state_dict(halves)
    weight = next(model.parameters())
    with told("the checkpoint has moments in float32"):
        optimizer.state[weight] = {**optimizer.state[weight], "exp_avg": torch.rand_like(weight, dtype=torch.float32)}
    before = copy.deepcopy(optimizer.state_dict())
    sharded = optimizer.sharded_state_dict()
    for entry in sharded["state"].values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HytrainWarning)
        with pytest.raises(HytrainWarning):
            optimizer.load_state_dict(halves)
        with pytest.raises(HytrainWarning):
            optimizer.load_sharded_state_dict(sharded)
    after = optimizer.state_dict()["state"]
    for number, entry in before["state"].items():
        assert_same(after[number], entry)
    with told("the checkpoint has moments in float32"):
        optimizer.load_sharded_state_dict(sharded)
    hytrain_fx.close(model)


def test_sharded_checkpoints_say_the_seed(tmp_path: Path) -> None:
    """torch.distributed.checkpoint fills only what is asked for, so a run that gave none asks too.

    One of fp32 moments has neither option, and is loaded with a planner that does without.
    """
    model, batches = start(torch.bfloat16)
    optimizer = compiled(model, **BF16)
    optimizer.param_groups[0]["moments_seed"] = 5
    trained(2, batches, model, optimizer)
    save({"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / "bf16")
    trained(2, batches, model, optimizer)
    expected = weights(model)
    hytrain_fx.close(model)
    model, _ = start(torch.bfloat16)
    optimizer = compiled(model)
    trained(2, batches, model, optimizer)
    wide = optimizer.sharded_state_dict()
    save({"optimizer": wide}, checkpoint_id=tmp_path / "fp32")
    hytrain_fx.close(model)
    model, _ = start(torch.bfloat16, seed=1)
    optimizer = compiled(model, **BF16)
    trained(1, batches, model, optimizer)
    found = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    load(found, checkpoint_id=tmp_path / "bf16")
    model.load_state_dict(found["model"])
    optimizer.load_sharded_state_dict(found["optimizer"])
    del found
    assert optimizer.param_groups[0]["moments_seed"] == 5
    trained(2, batches, model, optimizer)
    assert_same(weights(model), expected)
    found = {"optimizer": optimizer.sharded_state_dict()}
    with pytest.raises(CheckpointException, match="Missing key"):
        load(found, checkpoint_id=tmp_path / "fp32")
    load(found, checkpoint_id=tmp_path / "fp32", planner=DefaultLoadPlanner(allow_partial_load=True))
    optimizer.load_sharded_state_dict(found["optimizer"])
    for name, entry in optimizer.sharded_state_dict()["state"].items():
        assert torch.equal(entry["exp_avg_sq"], wide["state"][name]["exp_avg_sq"].bfloat16())
    hytrain_fx.close(model)


def test_a_checkpoint_of_other_states_is_refused() -> None:
    """amsgrad is fixed by compile(): loading says so, not the next step, and changes nothing."""
    model, batches = start()
    plain = torch.optim.AdamW(model.parameters(), amsgrad=True, **HYPER)
    trained(1, batches, model, plain)
    saved = plain.state_dict()
    optimizer = compiled(model, **BF16)
    sharded = {"state": {}, "param_groups": [{**saved["param_groups"][0], "params": list(dict(model.named_parameters()))}]}
    for load_it, state_dict in ((optimizer.load_state_dict, saved), (optimizer.load_sharded_state_dict, sharded)):
        with pytest.raises(ValueError, match="asks for the states exp_avg, exp_avg_sq, max_exp_avg_sq"):
            load_it(state_dict)
    trained(1, batches, model, optimizer)
    hytrain_fx.close(model)


def test_a_compile_that_is_refused_or_over_leaves_no_option_in_the_groups() -> None:
    """The next compile() is asked again, and what a group said by itself stays."""
    model, batches = start()
    matrices = [{"params": [p for p in model.parameters() if p.dim() > 1], "moments_seed": 9}]
    vectors = [{"params": [p for p in model.parameters() if p.dim() <= 1], "amsgrad": True}]
    both = torch.optim.AdamW(matrices + vectors, **HYPER)
    with pytest.raises(UnsupportedError, match="amsgrad=True with moments"):
        hytrain_fx.compile(model, both, **BF16)
    assert ["moments" in group for group in both.param_groups] == [False, False]
    plain = torch.optim.AdamW(model.parameters(), **HYPER)
    for options, dtype in ((BF16, torch.bfloat16), ({"moments": "fp32"}, torch.float32), (BF16, torch.bfloat16), ({}, torch.float32)):
        optimizer = hytrain_fx.compile(model, plain, k=0, **options)[1]
        trained(1, batches, model, optimizer)
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == dtype
        hytrain_fx.close(model)
    plain.param_groups[0]["moments"] = "bf16"
    with told("moments='fp32' has no effect", "the checkpoint has moments in float32"):
        hytrain_fx.compile(model, plain, k=0, moments="fp32")
    hytrain_fx.close(model)


def test_a_wrong_seed_is_named_and_explain_goes_on() -> None:
    """The step is refused for what it is; the plan can be looked at meanwhile."""
    model, batches = start()
    optimizer = compiled(model, k=0, **BF16)
    trained(1, batches, model, optimizer)
    optimizer.param_groups[0]["moments_seed"] = 0.5
    with pytest.raises(UnsupportedError, match=r"^moments_seed of a parameter group is 0[.]5"):
        trained(1, batches, model, optimizer)
    assert "(seed 0.5)" in " ".join(hytrain_fx.explain(model).details().split())
    hytrain_fx.close(model)
