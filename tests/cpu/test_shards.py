"""Ranks that update shards have the bits of whole gradients, averaged by hand, in any loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.config import OnNonfinite

from . import shard_loops
from .loops import HYPER, assert_same
from .rank_loops import require_bits_by_hand, started
from .shard_loops import IN_TURNS, LOOPS


@pytest.mark.sample(0)
def test_every_loop_has_the_bits_of_whole_gradients(tmp_path: Path) -> None:
    """Reads, edits, clips, sums: each rank's states move at every step, and one rank is slow."""
    first, second = started(partial(shard_loops.every_loop, IN_TURNS), 2, tmp_path)
    assert len(first) == len(LOOPS), first
    assert {found["shards"] for _, found in first.values()} == {6}
    require_bits_by_hand((first, second), "seen")


@pytest.mark.sample(0)
def test_a_checkpoint_is_that_of_one_process(tmp_path: Path) -> None:
    """It has whole tensors on every rank, and goes on with any number of ranks, bit for bit."""
    first, second = started(shard_loops.saved, 2, tmp_path)
    assert_same(_flat(first["optimizer"]), _flat(second["optimizer"]))
    assert torch.equal(first["exp_avg"], _flat(first["optimizer"])["9.exp_avg"])
    alone = started(partial(shard_loops.resumed, first), 1, tmp_path)[0]
    assert_same(_flat(alone["loaded"]), _flat(first["optimizer"]))
    for size in (2, 4):
        for found in started(partial(shard_loops.resumed, first), size, tmp_path):
            for what in ("loaded", "optimizer"):
                assert_same(_flat(found[what]), _flat(alone[what]))
            assert_same(found["model"], alone["model"])


def _flat(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": value for number, entry in state_dict["state"].items() for name, value in entry.items()}


@pytest.mark.sample(0)
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_step_that_is_infinite_on_one_rank_is_left_out_on_all(mode: OnNonfinite, tmp_path: Path) -> None:
    """Weights stay, and each rank is told where it asked for it."""
    for errors, before, after in started(partial(shard_loops.infinite_on_one, mode), 2, tmp_path):
        assert_same(before, after)
        assert len(errors) == (mode == "raise")


@pytest.mark.sample(0)
def test_other_optimizers_are_alike_on_all_ranks(tmp_path: Path) -> None:
    """Those with a kernel of their own have shards too."""
    first, second = started(shard_loops.other_optimizers, 2, tmp_path)
    assert first["Lion"]["shards"] == 6
    assert_same(first["Lion"]["weights"], second["Lion"]["weights"])


@pytest.mark.sample(0)
def test_one_rank_may_read_what_all_have_settled(tmp_path: Path) -> None:
    """Else it waits for the others, and the error says what to do."""
    first, second = started(shard_loops.read_alone, 2, tmp_path, timeout_s=4.0)
    assert "waited for the new weights" in first
    assert "call hytrain_fx.settle(model) on every rank" in first
    assert second.startswith("RuntimeError")  # of its barrier, to which the first never came


@pytest.mark.sample(0)
def test_a_forked_child_finds_whole_weights(tmp_path: Path) -> None:
    """Those of the step that was committed before, on every rank."""
    for in_child, here in started(shard_loops.forked, 2, tmp_path):
        assert in_child == here


@pytest.mark.sample(0)
def test_each_rank_saves_its_shards_and_any_number_loads_them(tmp_path: Path) -> None:
    """By torch.distributed.checkpoint, while training goes on; two ranks save, 1, 2 and 4 load."""
    folder = str(tmp_path / "checkpoint")
    first, _ = started(partial(shard_loops.saved_in_shards, folder), 2, tmp_path)
    assert "head.weight" in first["dtensors"]
    assert "norm.weight" not in first["dtensors"]
    alone = started(partial(shard_loops.resumed_from_shards, folder), 1, tmp_path)[0]
    assert_same(_flat(alone["loaded"]), _flat(first["whole"]))
    assert alone["lr"] == HYPER["lr"]
    for size in (2, 4):
        for found in started(partial(shard_loops.resumed_from_shards, folder), size, tmp_path):
            for what in ("loaded", "optimizer"):
                assert_same(_flat(found[what]), _flat(alone[what]))
            assert_same(found["model"], alone["model"])


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    """Neither options nor states: of other groups, without a state, of another shape."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), workers=1)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    before, good = optimizer.sharded_state_dict(), optimizer.sharded_state_dict()
    other: dict[str, Any] = {"lr": 7.0, "params": ["weight", "bias"]}
    alone = [{**other, "params": [name]} for name in other["params"]]
    (weight,) = (entry for name, entry in good["state"].items() if name == "weight")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "param_groups": alone}, "2 parameter groups, this optimizer has 1"),
        ({"param_groups": [other], "state": {"weight": {"step": weight["step"]}}}, "has no exp_avg for weight"),
        ({"param_groups": [other], "state": {"weight": {**weight, "exp_avg": torch.zeros(3)}}}, "exp_avg of weight has shape"),
    ]
    for state_dict, message in wrong:
        with pytest.raises(ValueError, match=message):
            optimizer.load_sharded_state_dict(state_dict)
        after = optimizer.sharded_state_dict()
        assert after["param_groups"] == before["param_groups"]
        for name, entry in before["state"].items():
            assert_same(after["state"][name], entry)
    hytrain_fx.close(model)


@pytest.mark.sample(0)
def test_states_are_saved_whatever_the_plans(tmp_path: Path) -> None:
    """Each rank asks the others for the same, though only some have slots."""
    first, second = started(shard_loops.saved_under_other_plans, 2, tmp_path)
    for one, other in zip(first, second, strict=True):
        assert_same(_flat(one), _flat(other))


@pytest.mark.sample(0)
def test_nodes_that_run_in_another_order_wait_for_their_turn(tmp_path: Path) -> None:
    """Gradients go from rank to rank in one order, with the bits of averaging by hand."""
    for expected, found in started(shard_loops.in_another_order, 2, tmp_path):
        assert found["seen"] == expected["seen"]
        assert_same(found["weights"], expected["weights"])
