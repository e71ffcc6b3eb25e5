"""An error of one rank alone is told to the others at once, and all can go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx

from .loops import weights
from .pipeline_loops import TIED, Pipeline
from .rank_loops import compiled, net, started

LIMIT_S = 60.0  # of the group; its first wait is longer yet
Said = tuple[str, float]


def said_by(call: Callable[[], object]) -> Said:
    """What it has raised, and after how many seconds."""
    begin_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return "no error", time.monotonic() - begin_s


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
                "tie_weights": ("tie_weights", "TypeError"), "stages_timeline": ("stages_timeline", "ValueError")}
    for what, (doing, kind) in expected.items():
        assert failed[what][0].startswith(kind), failed[what]
        assert re.match(rf"RankError: rank 0 has come to .*, rank 1 to an error in {doing} \({kind}: [^\n]*\): all ranks", other[what][0])
        assert max(of[what][1] for of in (other, failed)) < LIMIT_S / 2
    for of in (other, failed):
        went_on = {what: said for what, (said, _) in of.items() if what not in expected}
        assert went_on == dict.fromkeys(("loaded", "tied", "recorded"), "no error")
