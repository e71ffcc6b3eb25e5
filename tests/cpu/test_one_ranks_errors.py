"""An error of one rank alone is told to the others at once, and all can go on.

Where they cannot, no rank waits longer than the group's limit, and none shows weights of which only
its shards are new.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of

from .loops import assert_same, weights
from .pipeline_loops import TIED, Pipeline
from .rank_loops import Said, compiled, free_port, net, said_by, started, tokens_of
from .threads import threads_left

LIMIT_S = 60.0  # of the group; its first wait is longer yet


def of_all(rank: int, size: int) -> dict[str, Said]:
    """The last rank's loader fails: before the ranks meet, and where masters are made.

    Then its stage's names and its recordings. Each of these comes about when it is asked for again.
    """
    values, found, bad = weights(net(0)), {}, rank == size - 1

    def load(how: str, wrong: str | None) -> Any:
        def source(name: str) -> torch.Tensor:
            if bad and name == wrong:
                raise ValueError(f"no {name} here\nnor elsewhere")
            return values[name]

        with hytrain_fx.on_meta():
            model = net(rank)
        compiled(model, weights=how, device="cpu", loader=source)
        return model

    for how, wrong in (("resident", "head.weight"), ("sharded", "layers.1.weight")):
        found[f"{how} {wrong}"] = said_by(partial(load, how, wrong))
    found["loaded"] = said_by(lambda: hytrain_fx.close(load("sharded", None)))

    def compile_here(**room: Any) -> None:
        model = net(0)
        compiled(model, gpu_states=0.0, **room)
        hytrain_fx.close(model)

    found["compile()"] = said_by(partial(compile_here, host_memory=1 if bad else None))
    found["compiled"] = said_by(compile_here)

    run = Pipeline("1F1B", True, torch.bfloat16, warmup_steps=2)
    names: list[Any] = [7] if bad else [TIED]
    found["tie_weights"] = said_by(lambda: hytrain_fx.tie_weights(run.parts, names))
    found["tied"] = said_by(lambda: hytrain_fx.tie_weights(run.parts, [TIED]))
    for step in range(9):  # until a plan is solved
        run.backward(step)
        run.end_step()
    with hytrain_fx.record(run.parts[0]) as recording:
        run.backward(0)
        run.end_step()
    recordings: Sequence[Any] = [] if bad else [recording]
    found["stages_timeline"] = said_by(lambda: hytrain_fx.stages_timeline(run.parts, recordings))
    found["recorded"] = said_by(lambda: hytrain_fx.stages_timeline(run.parts, recording))
    return found


@pytest.mark.sample(0)  # .ci/run names this file
def test_an_error_of_one_rank_is_told_to_the_other_at_once(tmp_path: Path) -> None:
    """The rank that has it raises it as it is, the other RankError with its text. Both go on."""
    other, failed = started(of_all, 2, tmp_path, timeout_s=LIMIT_S)
    assert isinstance(other, dict), other
    expected = {"resident head.weight": ("its loader", "ValueError"), "sharded layers.1.weight": ("its loader", "ValueError"),
                "compile()": (r"compile\(\)", "ConfigError"), "tie_weights": ("tie_weights", "TypeError"),
                "stages_timeline": ("stages_timeline", "ValueError")}
    for what, (doing, kind) in expected.items():
        assert failed[what][0].startswith(kind), failed[what]
        assert re.match(rf"RankError: rank 0 has come to .*, rank 1 to an error in {doing} \({kind}: [^\n]*\): all ranks", other[what][0])
        assert max(of[what][1] for of in (other, failed)) < LIMIT_S / 2
    for of in (other, failed):
        went_on = {what: said for what, (said, _) in of.items() if what not in expected}
        assert went_on == dict.fromkeys(("loaded", "compiled", "tied", "recorded"), "no error")


# ---- no weights of which only some shards are new ----


def step(model: Any, optimizer: Any, rank: int, number: int) -> None:
    model(tokens_of(rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def other_gradients(rank: int, size: int) -> dict[str, Any]:
    """The last rank drops a gradient by hand.

    Gives the weights before and after `step()`, and after the next one.
    """
    model: Any = net(rank)
    optimizer = compiled(model, k=0)
    step(model, optimizer, rank, 0)
    found: dict[str, Any] = {"before": weights(model)}
    model(tokens_of(rank, 1)).backward()
    if rank == size - 1:
        model.head.weight.grad = None
    found["said"] = [said_by(optimizer.step)[0] for _ in range(2)]
    found["after"] = weights(model)
    optimizer.zero_grad()
    step(model, optimizer, rank, 2)
    return {**found, "next": weights(model)}


@pytest.mark.sample(0)
def test_a_step_of_other_gradients_is_refused_before_it_begins(tmp_path: Path) -> None:
    """No weight has changed on any rank, and training goes on alike."""
    first, second = started(other_gradients, 2, tmp_path)
    for found in (first, second):
        assert all("number 4 is head.weight on rank 0 and nothing on rank 1" in said for said in found["said"]), found["said"]
        assert_same(found["after"], found["before"])
    assert_same(first["next"], second["next"])
    assert not torch.equal(first["next"]["head.weight"], first["before"]["head.weight"])


def no_gather(rank: int, size: int) -> list[str]:
    """The last rank stops after a step. What readers of the other one are told, again and again."""
    model: Any = net(rank)
    optimizer = compiled(model, k=0)
    step(model, optimizer, rank, 0)
    if rank == size - 1:
        time.sleep(24.0)
        return []
    readers: list[Callable[[], object]] = [*[lambda: model(tokens_of(rank, 9))] * 8, model.state_dict, lambda: weights(model)]
    with torch.no_grad():
        return [said_by(reader)[0] for reader in [*readers, lambda: hytrain_fx.close(model), lambda: hytrain_fx.close(model)]]


@pytest.mark.sample(0)
def test_a_gather_that_failed_is_never_done(tmp_path: Path) -> None:
    """Each reader is told, not the first of each unit alone: the other rank's shards are old.

    Then `close()` ends all.
    """
    said, _ = started(no_gather, 2, tmp_path, timeout_s=8.0)
    assert len(said) == 12
    assert all(one.startswith("RankError: rank 0 of 2 waited for the new weights of") for one in said[:-1]), said
    assert said[-1] == "no error"


# ---- the end of a rank that has failed ----


def closed_by_one(how: str, rank: int, size: int) -> dict[str, Any]:
    """The engine of the last rank fails, and it closes; the other trains on, then closes too."""
    model: Any = net(rank)
    optimizer = compiled(model, k=0, weights=how)
    step(model, optimizer, rank, 0)
    if rank == size - 1:
        session_of(model).engine.fail_next_update(1)
    said = [said_by(partial(step, model, optimizer, rank, number))[0] for number in (1, 2)]
    said_by(lambda: hytrain_fx.close(model))
    empty = [p.untyped_storage().nbytes() for p in model.parameters()].count(0)
    return {"steps": said[-1], "threads": threads_left(), "empty": empty}


@pytest.mark.sample(0)
@pytest.mark.parametrize("how", ["resident", "sharded"])
def test_close_ends_the_threads_of_a_rank_that_has_failed(how: str, tmp_path: Path) -> None:
    """Though it tells of what failed. Every parameter has memory then."""
    for found in started(partial(closed_by_one, how), 2, tmp_path, timeout_s=8.0):
        assert re.match("EngineError: |RankError: ", found["steps"]), found
        assert (found["threads"], found["empty"]) == ([], 0), found


ENDS = """
import os, sys, time
from datetime import timedelta
import torch
import hytrain_fx
from tests.cpu.interpreted import graphs_interpreted
from tests.cpu.rank_loops import compiled, net, tokens_of
rank, how, then, limit_s = int(os.environ["RANK"]), sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=240))  # until both have started
with graphs_interpreted():
    model = net(rank)
    optimizer = compiled(model, weights=how, process_group=torch.distributed.new_group(timeout=timedelta(seconds=limit_s)))
    try:
        for step in range(3):
            if step == 2 and rank == 1:
                if then == "raises":
                    raise ValueError("no batch")
                time.sleep(600)
            model(tokens_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        hytrain_fx.close(model)
"""


def ranks_that_end(*arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes that run `ENDS`, with the interpreter's own end."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    root = str(Path(__file__).resolve().parents[2])
    script = [sys.executable, "-c", ENDS, *arguments]
    return [subprocess.Popen(script, env={**os.environ, **address, "RANK": str(rank), "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""},
                             stderr=subprocess.PIPE, text=True) for rank in range(2)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("how", ["resident", "sharded"])
def test_a_rank_whose_other_does_not_come_ends(how: str) -> None:
    """Soon after its error, with its own exit code, which its launcher sees."""
    waiting, asleep = ranks_that_end(how, "sleeps", "8")
    try:
        _, error = waiting.communicate(timeout=240.0)
        assert waiting.returncode == 1, error
        assert "RankError: rank 0 of 2 waited for" in error
    finally:
        asleep.kill()
        asleep.communicate()


@pytest.mark.sample(0)
@pytest.mark.parametrize("how", ["resident", "sharded"])
def test_close_after_an_error_of_one_rank_ends_no_process(how: str) -> None:
    """The user's own error is what the launcher finds."""
    other, failed = ranks_that_end(how, "raises", "60")
    try:
        errors = [process.communicate(timeout=240.0)[1] for process in (failed, other)]
        assert (failed.returncode, other.returncode) == (1, 1), errors
        assert "ValueError: no batch" in errors[0]
        assert "RankError: " in errors[1]
    finally:
        for process in (failed, other):
            process.kill()
