"""Several processes train one model: gradients are averaged inside the captured graphs.

With two ranks every bit is that of averaging by hand.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import hytrain_fx
from hytrain_fx.errors import ConfigError
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.gradients.turns import turns
from hytrain_fx.ir.shard import Shard, shard_of
from hytrain_fx.runtime.ranks import _bucket
from hytrain_fx.runtime.shard_layout import ShardLayouts

from . import rank_loops
from .loops import HYPER, assert_same
from .rank_loops import LOOPS, require_bits_by_hand, started

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ranks.py"


@pytest.mark.sample(1)
@pytest.mark.parametrize("loops", [LOOPS[:1], LOOPS[1:4], LOOPS[4:]], ids=["plain", "first loops", "other loops"])
def test_two_ranks_have_the_bits_of_averaging_by_hand(loops: Sequence[tuple[str, str]], tmp_path: Path) -> None:
    """Losses and weights are equal on each rank, though one is slow; weights and states on both.

    Every loop, with every state on the host, and with some on the device and early updates.
    """
    first, second = started(partial(rank_loops.every_loop, loops), 2, tmp_path)
    assert len(first) == len(loops)
    require_bits_by_hand((first, second), "losses")
    for loop in first:
        one, other = first[loop], second[loop]
        assert one[0]["losses"][0] != other[0]["losses"][0]  # each has batches of its own
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours["weights"], theirs["weights"])
        assert all(map(torch.equal, one[1]["states"], other[1]["states"]))
        assert one[1]["runs"]["grad_offload"] == other[1]["runs"]["grad_offload"] > 0
        nodes = " ".join(one[1]["nodes"])
        assert all(word in nodes for word in ("reduce-scattered", "all-reduced", "gathered from all ranks"))
        for number, of in enumerate((one, other)):
            assert f"2 ranks train together, this is rank {number}" in " ".join(of[1]["text"].split())


@pytest.mark.sample(0)
def test_four_ranks_stay_alike(tmp_path: Path) -> None:
    """Whatever the plan of each of them, weights and states have the same bits."""
    ranks = started(rank_loops.two_plans, 4, tmp_path)
    for found in ranks:
        for of in found:
            assert_same(of["weights"], ranks[0][0]["weights"])
            assert all(map(torch.equal, of["states"], ranks[0][0]["states"]))


@pytest.mark.sample(0)
def test_ranks_of_two_machines_stay_alike(tmp_path: Path) -> None:
    """Only cores and memory are shared among the ranks of one."""
    ranks = started(rank_loops.two_nodes, 4, tmp_path)
    for found in ranks:
        assert_same(found["weights"], ranks[0]["weights"])


@pytest.mark.sample(0)
def test_groups_of_two_train_two_models(tmp_path: Path) -> None:
    """A group that is given is used in place of the default one."""
    first, second, third, fourth = started(rank_loops.in_pairs, 4, tmp_path)
    assert_same(first["weights"], second["weights"])
    assert_same(third["weights"], fourth["weights"])
    assert not torch.equal(first["weights"]["head.weight"], third["weights"]["head.weight"])


@pytest.mark.sample(0)
def test_ranks_may_be_left_alone(tmp_path: Path) -> None:
    """With process_group=False each has its own weights, as without a group."""
    first, second = started(rank_loops.left_alone, 2, tmp_path)
    assert not torch.equal(first["weights"]["head.weight"], second["weights"]["head.weight"])
    assert "ranks train together" not in first["text"]


@pytest.mark.sample(0)
def test_a_rank_without_a_gradient_adds_zeros(tmp_path: Path) -> None:
    """Each rank takes branches of its own; weights are those of averaging by hand with zeros."""
    require_bits_by_hand(started(rank_loops.other_branches, 2, tmp_path), "losses")


@pytest.mark.sample(0)
def test_ranks_at_different_points_are_told(tmp_path: Path) -> None:
    """One begins a backward more than the other, which steps: both raise at once."""
    for found in started(rank_loops.one_more_backward, 2, tmp_path):
        assert found.startswith("RankError: rank 0 has come to the parameters that step() updates, rank 1 to backward 2")


def test_other_models_are_refused(tmp_path: Path) -> None:
    """Before anything is sent from rank to rank."""
    for found in started(rank_loops.other_model, 2, tmp_path):
        assert found.startswith("RankError: the model's parameters and buffers differ between ranks: number 0 is words.weight")


@pytest.mark.sample(0)
def test_a_rank_that_stops_does_not_hang_the_others(tmp_path: Path) -> None:
    """They raise within the group's time limit, and name what they waited for."""
    first, second = started(rank_loops.one_stops, 2, tmp_path, timeout_s=4.0)
    assert first.startswith("RankError: rank 0 of 2 waited for the new weights of words.weight")
    assert second is None


@pytest.mark.sample(0)
def test_a_backward_that_one_rank_breaks_off_is_told_on_all(tmp_path: Path) -> None:
    """Its next gradients are not added to those that the other rank still waits for."""
    first, second = started(rank_loops.broken_off, 2, tmp_path, timeout_s=4.0)
    assert first
    assert first[0].startswith("RankError: rank 0 of 2 waited for the gradients of")
    assert second[0] == "KeyboardInterrupt: by hand"
    assert second[1].startswith("RankError: a backward of this rank was broken off (KeyboardInterrupt: by hand)")


@pytest.mark.sample(0)
def test_sums_of_gradients_of_code_outside_the_graphs_are_refused(tmp_path: Path) -> None:
    """One rank's own part is in them: training on would part the ranks."""
    for found in started(rank_loops.eager_gradient, 2, tmp_path):
        assert found.startswith("the gradient of side.weight (and of 1 more) was made outside captured graphs")


@pytest.mark.sample(0)
def test_the_example_ends_with_equal_weights() -> None:
    """As its text says, started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--steps", "5"]
    stacks = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # of all threads, where a signal ends a rank
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=stacks)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks: all ranks have the same weights" in run.stdout


@pytest.mark.parametrize("wrong", ["world", 2, True])
def test_a_wrong_group_is_named(wrong: object) -> None:
    """So is a group where torch.distributed has not begun."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"option process_group=.*init_process_group first"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), process_group=wrong)


@given(shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), last=st.booleans())
def test_what_is_summed_together_keeps_its_form(shapes: list[list[int]], dtype: torch.dtype, last: bool) -> None:
    """Each view has its tensor's strides, begins a cache line, and shares no element."""
    like = [torch.empty(shape, dtype=dtype) for shape in shapes]
    like = [t.to(memory_format=torch.channels_last) if last and t.dim() == 4 else t for t in like]
    bucket, views = _bucket(like, dtype)
    for number, (view, tensor) in enumerate(zip(views, like, strict=True)):
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        assert (view.data_ptr() - bucket.data_ptr()) % 64 == 0
        view.fill_(number + 1)
    assert int((bucket != 0).sum()) == sum(t.numel() for t in like)
    assert all(bool((view == number + 1).all()) for number, view in enumerate(views))


@given(shapes=st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=3), min_size=1, max_size=5), ranks=st.integers(2, 5))
def test_shards_cover_a_parameter_once_and_come_together_again(shapes: list[list[int]], ranks: int) -> None:
    """What ranks take out of one memory and put into another is the whole, bit for bit."""
    found = {row: shard_of(shape, 0, ranks) for row, shape in enumerate(shapes)}
    rows = tuple(row for row, shard in found.items() if shard is not None)
    wholes = [torch.randn(math.prod(shapes[row])) for row in rows]
    assume(rows)
    layouts = [ShardLayouts({row: Shard(math.prod(shapes[row]), rank, ranks) for row in rows})[rows] for rank in range(ranks)]
    packed = layouts[0].pack(wholes)
    parts = packed.view(ranks, -1)
    for rank, layout in enumerate(layouts):
        for row, whole, mine in zip(rows, wholes, layout.shards(parts[rank]), strict=True):
            shard = Shard(whole.numel(), rank, ranks)
            assert mine.numel() == shard.sizes[rank] > 0
            assert torch.equal(mine, whole[shard.begin : shard.end])
            if shapes[row][0] % ranks == 0 and shard.each * ranks == shard.numel:
                assert torch.equal(mine, whole.view(shapes[row]).chunk(ranks)[rank].flatten())
        others = [torch.full_like(whole, torch.nan) for whole in wholes]
        layout.unpack_others(packed, others)
        for whole, other in zip(wholes, others, strict=True):
            shard = Shard(whole.numel(), rank, ranks)
            assert bool(other[shard.begin : shard.end].isnan().all())
            other[shard.begin : shard.end] = whole[shard.begin : shard.end]
            assert torch.equal(other, whole)
        bucket, own = layout.pack_own(wholes)
        assert own.data_ptr() == bucket[rank * own.numel() :].data_ptr()
        assert all(map(torch.equal, layout.shards(own), layout.shards(parts[rank])))


_NODES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True).map(tuple), max_size=6)


@given(of_ranks=st.lists(_NODES, min_size=1, max_size=4))
def test_every_row_has_one_turn_that_its_nodes_are_in(of_ranks: list[list[tuple[int, ...]]]) -> None:
    """No node is split. Rows that come together are those of nodes that share rows, no more."""
    order = turns(of_ranks)
    rows = [row for turn in order for row in turn]
    assert sorted(rows) == sorted({row for nodes in of_ranks for node in nodes for row in node})
    for turn in order:
        inside = [set(node) for nodes in of_ranks for node in nodes if set(node) & set(turn)]
        assert all(node <= set(turn) for node in inside)
        reached = inside.pop()
        while meeting := [node for node in inside if node & reached]:
            reached |= set().union(*meeting)
            inside = [node for node in inside if node not in meeting]
        assert not inside


@given(nodes=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)), ranks=st.integers(1, 3), draw=st.randoms())
def test_turns_of_the_same_nodes_are_those_of_the_first_rank(nodes: list[int], cuts: set[int], ranks: int, draw: random.Random) -> None:
    """Whatever the order of the others, and whichever nodes these lack."""
    of_first = [tuple(nodes[begin:end]) for begin, end in itertools.pairwise([0, *sorted(cuts), 12])]
    others = [draw.sample(of_first, draw.randint(0, len(of_first))) for _ in range(ranks)]
    assert turns([of_first, *others]) == tuple(of_first)


def test_what_is_kept_of_many_graphs_has_a_bound() -> None:
    """A loop that drops layers at random has a graph for each choice. Its order is found again."""
    ranks: Any = SimpleNamespace(tell=lambda point, found: (hash(found),), of_all=lambda what, found: [found])
    table: Any = SimpleNamespace(shards={row: Shard(64, 0, 2) for row in range(5000)}, device=torch.device("cpu"))
    averaged, layouts = AveragedGradients(ranks, table), ShardLayouts(table.shards)
    for row in [*range(5000), 0]:
        averaged.begin([(row,), (row + 1,)])
        assert averaged.is_of_node((row,))
        assert layouts[(row,)].numel == layouts[(0,)].numel
    assert len(averaged._orders) <= 256
    assert len(layouts._made) <= 4096


def test_vectors_and_small_matrices_are_whole() -> None:
    """Every rank updates them. A larger matrix is cut into equal parts; the last may be smaller."""
    assert shard_of((4096,), 0, 2) is None
    assert shard_of((8, 8), 1, 2) is None
    cut = shard_of((50257, 1600), 1, 2)
    assert cut is not None
    assert cut.sizes == [40205632, 40205568]
    assert (cut.begin, cut.end) == (40205632, 50257 * 1600)
