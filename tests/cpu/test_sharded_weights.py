"""Ranks that keep shards of weights, and gather each unit before a graph reads it.

Every bit is that of the same ranks with resident weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import EngineError, RankError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.weights.gather_order import GatherOrder

from . import shard_loops, sharded_loops
from .loops import assert_same
from .programs import search
from .rank_loops import Found, started
from .rank_programs import RankWorkshop, drawn_sharded_setup
from .sharded_loops import require_resident_bits

MATRICES = {"words.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "head.weight", "side.weight"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", [("plain", "accumulated"), ("clipped", "evaluated"), ("scaler", "moments")], ids=", ".join)
def test_loops_of_two_ranks_have_the_bits_of_resident_weights(names: Sequence[str], tmp_path: Path) -> None:
    """With every state on the host, and some on the device and early updates; one rank is slow."""
    ranks = started(partial(sharded_loops.loops_of_ranks, names), 2, tmp_path)
    require_resident_bits(ranks, "losses")
    text = " ".join(ranks[0][names[0]][1]["text"].split())
    assert "sharded weights: 6 of 12" in text


@pytest.mark.sample(0)
@pytest.mark.parametrize("names", [("plain", "clipped", "accumulated", "read"), ("edited", "not_dropped", "weights_used"),
                                   ("broken", "partly_eager", "all_eager"), ("hooked",)], ids=", ".join)
def test_what_loops_do_to_weights_and_gradients_changes_no_bit(names: Sequence[str], tmp_path: Path) -> None:
    """Reads, edits, writes, graph breaks, eager layers, hooks; states move at every step."""
    require_resident_bits(started(partial(sharded_loops.loops_of_shards, names), 2, tmp_path))


@pytest.mark.sample(0)
def test_four_ranks_have_the_bits_of_resident_weights(tmp_path: Path) -> None:
    """The last shard of the embedding is shorter than the others."""
    require_resident_bits(started(partial(sharded_loops.loops_of_shards, ("clipped",)), 4, tmp_path))


@pytest.mark.sample(0)
def test_tied_frozen_and_unused_weights_and_layers_computed_again(tmp_path: Path) -> None:
    """Two forwards before their backwards, and evaluations in between."""
    require_resident_bits(started(sharded_loops.varied, 2, tmp_path))


@pytest.mark.fused_kernels
@pytest.mark.timeout(1000)  # more than `started` allows
@pytest.mark.sample(0)
def test_inductor_keeps_the_order_of_gathers_and_gradients(tmp_path: Path) -> None:
    """Three layers, with its kernels and with a batch of another size."""
    require_resident_bits(started(sharded_loops.fused, 2, tmp_path, fused=True))


@pytest.mark.sample(0)
@pytest.mark.parametrize(("seed", "options"), [(8, "weights sharded, solved"), (5, "shards on the host")])
def test_drawn_programs_have_the_bits_of_averaging_by_hand(seed: int, options: str) -> None:
    """Every loss, norm, weight, gradient and state, with other plans and delays on each rank."""
    setup = drawn_sharded_setup(seed)
    assert setup.options == options
    found = search(seed, 8, setup, RankWorkshop, shrink_s=0.0)
    assert not found.failures, f"{found.failures[0].error}\n{found.failures[0].program}"
    assert found.programs == 8


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Found]:
    """What two ranks have found in one start of their processes."""
    works: dict[str, Any] = {
        "rests": partial(sharded_loops.what_rests, "sharded"), "rests on the host": partial(sharded_loops.what_rests, "sharded_host"),
        "read": partial(sharded_loops.alone, "read", True), "evaluate": partial(sharded_loops.alone, "evaluate", True),
        "held": sharded_loops.held_by_one, "elsewhere": sharded_loops.read_elsewhere, "refused": sharded_loops.refused,
        "dropped": sharded_loops.dropped}
    found = started(partial(sharded_loops.together, works), 2, tmp_path_factory.mktemp("ranks"))
    assert all(isinstance(of, dict) for of in found), found
    return found


WHOLE = {"words.weight": 2 * 40 * 48, "head.weight": 2 * 40 * 48, **{f"layers.{n}.weight": 2 * 48 * 48 for n in range(3)}}


@pytest.mark.sample(0)
def test_no_rank_has_whole_weights_between_steps(checks: Sequence[Found]) -> None:
    """It has its shards and slots, and says so. After settle() it has all."""
    for found in (of["rests"] for of in checks):
        assert set(found["away"]) == set(found["shards"]) == set(found["settled"]) == MATRICES
        assert all(found["shards"][name] * 2 == nbytes for name, nbytes in WHOLE.items())
        assert found["slots"] == found["in slots"] > 0
        assert found["fetched"] == 3 * 2 * sum(WHOLE.values()) - 3 * WHOLE["words.weight"]  # no backward reads the embedding
        vectors = sum(nbytes for name, nbytes in found["bytes"].items() if name not in MATRICES)
        assert found["in use"] == found["estimate"][0] == vectors + sum(found["shards"].values())
        assert found["estimate"][1] >= found["slots"]
        assert "of which this rank has" in " ".join(found["text"].split())
        assert all(found[place] == (MATRICES, 0, found["in use"]) for place in Placement)
        assert not found["sharded again"]  # what eager code reads stays whole, also when states move


@pytest.mark.sample(0)
@pytest.mark.parametrize("of", ["rests", "rests on the host"])
def test_saving_and_loading_bring_no_weight_to_stay(of: str, checks: Sequence[Found]) -> None:
    """`state_dict()` gathers one after the other for the host. What is loaded goes to shards."""
    for found in (rank[of] for rank in checks):
        assert found["negated"]
        assert found["head"]
        assert set(found["away after saving"]) == MATRICES


@pytest.mark.sample(0)
def test_shards_on_the_host_follow_their_states(checks: Sequence[Found]) -> None:
    """Those that the CPU updates take nothing of the device. Others are there, and counted so."""
    for found in (of["rests on the host"] for of in checks):
        assert found["shards"] == {}
        assert set(found["away"]) == set(found["settled"]) == MATRICES
        vectors = sum(nbytes for name, nbytes in found["bytes"].items() if name not in MATRICES)
        assert found["in use"] == found["estimate"][0] == vectors
        assert found["slots"] == found["in slots"] > 0
        of_rank = sum(checks[0]["rests"]["shards"].values())
        assert found[Placement.GPU] == found[Placement.STREAM] == (MATRICES, of_rank, vectors + of_rank)
        assert found[Placement.CPU] == (set(), 0, vectors)
        assert "of it on the host" in " ".join(found["text"].split())


@pytest.mark.sample(0)
@pytest.mark.parametrize("loops", [(shard_loops.saved, shard_loops.resumed)], ids=["whole"])
def test_checkpoints_are_those_of_resident_weights(loops: Any, tmp_path: Path) -> None:
    """Saved with sharded weights, loaded with them and with resident ones: the same bits."""
    saved, resumed = loops
    first, second = started(partial(sharded_loops.checkpoints, saved), 2, tmp_path)
    expected = started(saved, 2, tmp_path)[0]
    for found in (first, second):
        assert_same(found["model"], expected["model"])
        assert torch.equal(found["exp_avg"], expected["exp_avg"])
    resident = started(partial(resumed, first), 2, tmp_path)[0]
    for found in started(partial(sharded_loops.checkpoints, partial(resumed, first)), 2, tmp_path):
        assert_same(found["model"], resident["model"])


@pytest.mark.sample(0)
def test_lion_has_the_bits_of_resident_weights(tmp_path: Path) -> None:
    """So an optimizer whose states have no signs to spare may have sharded weights."""
    expected = started(shard_loops.other_optimizers, 2, tmp_path)[0]
    for found in started(partial(sharded_loops.checkpoints, shard_loops.other_optimizers), 2, tmp_path):
        assert_same(found["Lion"]["weights"], expected["Lion"]["weights"])


@pytest.mark.sample(0)
def test_checkpoints_in_shards_need_no_whole_states(tmp_path: Path) -> None:
    """Ranks save through torch.distributed.checkpoint; with shards on the host they load it."""
    folder = str(tmp_path / "saved")
    first, _ = started(partial(sharded_loops.checkpoints, partial(shard_loops.saved_in_shards, folder)), 2, tmp_path)
    assert len(first["dtensors"]) >= 4
    resident = started(partial(shard_loops.resumed_from_shards, folder), 2, tmp_path)[0]
    on_host = partial(sharded_loops.checkpoints, partial(shard_loops.resumed_from_shards, folder), weights="sharded_host")
    for found in started(on_host, 2, tmp_path):
        assert_same(found["model"], resident["model"])


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", ["read", "evaluate"])
def test_one_rank_alone_may_read_what_all_have_settled(what: str, checks: Sequence[Found], tmp_path: Path) -> None:
    """Without settle() before it each rank is told so, at once, and none hangs."""
    first, second = (of[what] for of in checks)
    assert_same(first, second)
    read = {"read": "weights that the loop reads", "evaluate": "the weights that a graph reads"}[what]
    for found in started(partial(sharded_loops.alone, what, False), 2, tmp_path):
        assert found.startswith("RankError:")
        assert read in found


@pytest.mark.sample(0)
def test_ranks_that_run_other_graphs_are_told(tmp_path: Path) -> None:
    """A branch of one rank alone, or other nodes in a backward: an error on all ranks."""
    for found in started(sharded_loops.branches, 2, tmp_path):
        assert found.startswith("RankError: the weights that a graph reads differ between ranks: number")
    for found in started(sharded_loops.in_another_order, 2, tmp_path):
        assert found.startswith("RankError: gradients that a backward makes differ between ranks")


@pytest.mark.sample(0)
def test_what_one_rank_alone_holds_all_gather(checks: Sequence[Found]) -> None:
    """A view that code of one rank keeps shows each update there."""
    require_resident_bits([of["held"] for of in checks])


@pytest.mark.sample(0)
def test_other_threads_and_processes_read_no_weights(checks: Sequence[Found]) -> None:
    """They are told, and training goes on."""
    for errors in (of["elsewhere"] for of in checks):
        assert len(errors) == 2
        assert all(error.startswith("another thread than the loop's, or a forked process, reads a weight") for error in errors)


@pytest.mark.sample(0)
def test_a_parameter_of_a_dropped_model_has_this_ranks_shard(checks: Sequence[Found]) -> None:
    """What other ranks had is NaN: nobody trains on with a mixture."""
    assert [of["dropped"] for of in checks] == [(True, True), (True, True)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("without", [0, 1])
def test_ranks_close_together_or_not_at_all(without: int, tmp_path: Path) -> None:
    """Where one rank has no room for whole weights, none gives its own back, and all say so."""
    for said, closed in started(partial(sharded_loops.one_without_room, without), 2, tmp_path, timeout_s=30.0):
        assert "for weights that are not whole anywhere" in said
        assert not closed


@pytest.mark.sample(0)
def test_a_rank_that_ends_is_told_to_the_others(tmp_path: Path) -> None:
    """In the next forward, at once."""
    first, _ = started(sharded_loops.one_ends, 2, tmp_path, timeout_s=30.0)
    assert first.startswith("RankError: rank 0 of 2 waited for the weights that a graph reads")


@pytest.mark.sample(0)
def test_what_ranks_cannot_do_is_refused(checks: Sequence[Found]) -> None:
    """With what to use."""
    for streamed, fp32, one, engine, early, other, lion in (of["refused"] for of in checks):
        assert 'use weights="sharded" or "resident"' in streamed
        assert 'weights="sharded": no weight of this model can be' in fp32
        assert 'weights="sharded" on one process' in one
        assert "option engine='torch'" in engine
        assert 'weights="sharded" with SGD' in other
        assert 'False or "auto" with weights="sharded_host"' in early
        assert 'use weights="sharded"' in lion


@given(units=st.integers(1, 8), ahead=st.integers(0, 9), nodes=st.integers(0, 8), draw=st.randoms())
def test_all_ranks_make_collectives_in_one_order(units: int, ahead: int, nodes: int, draw: random.Random) -> None:
    """Whether nodes come as the text has them, or gradients are held back: it is the same."""
    before = sorted(draw.randint(0, nodes) for _ in range(units))
    text = sorted([(after, 0, unit) for unit, after in enumerate(before)] + [(node, 1, node) for node in range(nodes)])
    orders = []
    for late in (0, 1, 3):  # gradients that come so many nodes late
        order, done, ready = GatherOrder(range(units), before, ahead), [], 0
        for _, is_gradient, number in text:
            if is_gradient:
                ready += 1
            else:
                try:
                    done += [("unit", unit) for unit in order.needed(number)]
                except EngineError:
                    done = []  # too late for the order: told, not traded
                    break
            while sum(of == "gradients" for of, _ in done) < ready - late:
                done += [("unit", unit) for unit in order.before_turn()]
                done.append(("gradients", sum(of == "gradients" for of, _ in done)))
        else:
            while sum(of == "gradients" for of, _ in done) < nodes:
                done += [("unit", unit) for unit in order.before_turn()]
                done.append(("gradients", sum(of == "gradients" for of, _ in done)))
            assert [unit for of, unit in done if of == "unit"] == list(range(units))
        orders.append(done)
    assert orders[0]
    assert all(not done or done == orders[0] for done in orders)


def test_gradients_that_differ_between_ranks_are_told() -> None:
    """Where no weights are gathered in between they may."""
    GatherOrder((), (), 2).only([True], alike=False)
    with pytest.raises(RankError, match="gradients that a backward makes differ between ranks"):
        GatherOrder((0,), (0,), 2).only([True], alike=False)
