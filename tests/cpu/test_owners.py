"""Ranks whose optimizer has no kernel: one of them updates each large parameter, and tells it.

With two ranks every bit is that of averaging by hand.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.config import OnNonfinite
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.shard import Shard, owners
from hytrain_fx.runtime.shard_layout import ShardLayouts

from . import owner_loops
from .loops import assert_same
from .owner_loops import KINDS
from .rank_loops import require_bits_by_hand, started
from .test_rules import assert_same_entry

MATRICES = 6  # of the net that ranks train


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", KINDS)
def test_every_loop_has_the_bits_of_averaging_by_hand(name: str, tmp_path: Path) -> None:
    """With the same optimizer, which each rank runs for its own parameters alone."""
    ranks = started(partial(owner_loops.every_loop, name), 2, tmp_path)
    assert len(ranks[0]) == sum(len(loops) for _, loops in KINDS[name]), ranks[0]
    require_bits_by_hand(ranks, "seen")
    for loop in ranks[0]:
        (_, first), (_, second) = (rank[loop] for rank in ranks)
        assert first["owned"] == MATRICES
        assert first["of_all"] == second["of_all"] == (set() if name == "Muon" else {Placement.GPU})  # the same bits on every rank
        assert sorted(first["kept"] + second["kept"]) == sorted({*first["kept"], *second["kept"]})  # nothing is kept twice
        assert min(len(first["kept"]), len(second["kept"])) > 0
        assert "each rank updates the matrices that it owns" in " ".join(first["text"].split())
        nodes = " ".join(first["nodes"])
        assert loop.startswith("all_eager") or ("reduced to their owners" in nodes and "from their owners" in nodes)


@pytest.mark.sample(0)
def test_a_rank_without_a_gradient_adds_zeros(tmp_path: Path) -> None:
    """Whether or not it owns the parameter."""
    require_bits_by_hand(started(owner_loops.branches, 2, tmp_path), "seen")


@pytest.mark.sample(0)
def test_four_ranks_stay_alike(tmp_path: Path) -> None:
    """Whatever the plan of each of them: weights, states and norms have the same bits."""
    ranks = started(owner_loops.four, 4, tmp_path)
    for found in ranks:
        assert found["seen"] == ranks[0]["seen"]
        assert_same(found["weights"], ranks[0]["weights"])
        _assert_same_states(found["optimizer"], ranks[0]["optimizer"])


@pytest.mark.sample(0)
def test_a_rank_may_own_nothing(tmp_path: Path) -> None:
    """It plans, measures and shows what it does as others do."""
    first, second = started(owner_loops.one_matrix, 2, tmp_path)
    assert_same(first["weights"], second["weights"])
    assert (first["params"], second["params"]) == (48 * 48, 0)


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["SGD nesterov", "Adafactor"])
def test_a_checkpoint_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """Whole on every rank, or each rank's part in a folder: 1, 2 and 4 ranks go on, bit for bit."""
    folder = str(tmp_path / "checkpoint")
    first, second = started(partial(owner_loops.saved, name, folder), 2, tmp_path)
    _assert_same_states(first["optimizer"], second["optimizer"])
    assert set(first["parts"]) != set(second["parts"])
    assert {*first["parts"], *second["parts"]} == set(first["read"])
    for found in (first, second):
        for read, entry in zip(found["read"].values(), first["optimizer"]["state"].values(), strict=True):
            assert_same_entry(read, entry)
    ranks = [of for size in (1, 2, 4) for of in started(partial(owner_loops.resumed_from_each, name, (first, folder)), size, tmp_path)]
    alone = ranks[0][0]
    _assert_same_states(alone["loaded"], first["optimizer"])
    for found in (of_checkpoint for of_rank in ranks for of_checkpoint in of_rank):
        for what in ("loaded", "optimizer"):
            _assert_same_states(found[what], alone[what])
        assert_same(found["model"], alone["model"])
    assert [len(of_rank) for of_rank in ranks] == [2] * 7


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_states_of_two_ranks_are_those_of_one(name: str, tmp_path: Path) -> None:
    """The same keys, also where a step keeps nothing."""
    alone = started(partial(owner_loops.saved_alone, name), 1, tmp_path)[0]
    assert bool(alone["state"]) == (name != "SGD")
    for found in started(partial(owner_loops.saved_alone, name), 2, tmp_path):
        _assert_same_states(found, alone)


@pytest.mark.sample(0)
def test_entries_are_written_and_deleted_on_every_rank(tmp_path: Path) -> None:
    """The owner has them, and the others give what it has."""
    first, second = started(owner_loops.states_edited, 2, tmp_path)
    before, none, written, there, count, deleted, left, cleared, weights = first
    assert (before, none, there, deleted, left, cleared) == (False, {}, False, {}, 0, {})
    assert bool((written["momentum_buffer"] == 2.0).all())
    assert count > 0
    assert_same_entry(second[2], written)
    assert [second[i] for i in (0, 1, 3, 4, 5, 6, 7)] == [first[i] for i in (0, 1, 3, 4, 5, 6, 7)]
    assert_same(second[8], weights)


@pytest.mark.sample(0)
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_step_that_is_infinite_on_one_rank_is_left_out_on_all(mode: OnNonfinite, tmp_path: Path) -> None:
    """Weights stay, and each rank is told."""
    for errors, before, after in started(partial(owner_loops.infinite_on_one, mode), 2, tmp_path):
        assert_same(before, after)
        assert len(errors) == (mode == "raise")


@pytest.mark.sample(0)
def test_numbers_that_all_parameters_share_need_every_rank(tmp_path: Path) -> None:
    """Where steps set them every rank updates all; one that begins to later is refused."""
    first, second = started(owner_loops.shared_numbers, 2, tmp_path, timeout_s=4.0)
    for owned, _, count, error in (first, second):
        assert (owned, count) == (0, 3)
        assert error.startswith("step 4: LateCounter.step() sets 'late' on itself or in its group, and did not when it was tried")
    assert_same(first[1], second[1])


def _assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        assert_same_entry(found["state"][number], entry)


@given(nbytes=st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1), ranks=st.integers(1, 6))
def test_owners_share_bytes_out(nbytes: dict[int, int], ranks: int) -> None:
    """Ranks differ by no more than the largest parameter, whatever the order they were given in."""
    found = owners(nbytes, ranks)
    assert found.keys() == nbytes.keys()
    assert owners(dict(reversed(nbytes.items())), ranks) == found
    of_ranks = [sum(nbytes[number] for number, owner in found.items() if owner == rank) for rank in range(ranks)]
    assert max(of_ranks) - min(of_ranks) <= max(nbytes.values())


@given(parameters=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=6), ranks=st.integers(2, 4))
def test_owned_parameters_go_whole_to_their_owners_and_back(parameters: list[tuple[int, int]], ranks: int) -> None:
    """A rank's part of the memory has what it owns; from all parts come the parameters again."""
    owned = [(numel, owner % ranks) for numel, owner in parameters]
    wholes = [torch.randn(numel) for numel, _ in owned]
    rows = tuple(range(len(owned)))
    layouts = [ShardLayouts({row: Shard(*owned[row][:1], rank, ranks, owned[row][1]) for row in rows})[rows] for rank in range(ranks)]
    packed = layouts[0].pack(wholes)
    for rank, layout in enumerate(layouts):
        mine = layout.shards(layout.parts(packed)[rank])
        for (numel, owner), whole, shard in zip(owned, wholes, mine, strict=True):
            assert torch.equal(shard, whole if owner == rank else whole[:0])
            assert shard.numel() == (numel if owner == rank else 0)
        others = [torch.full_like(whole, torch.nan) for whole in wholes]
        layout.unpack_others(packed, others)
        for (_, owner), whole, other in zip(owned, wholes, others, strict=True):
            assert bool(other.isnan().all()) if owner == rank else torch.equal(other, whole)
        bucket, own = layout.pack_own(wholes)
        assert own.numel() == layout.lengths[rank]
        assert all(map(torch.equal, layout.shards(layout.parts(bucket)[rank]), mine))
