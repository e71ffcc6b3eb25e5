"""Stages of torch's pipelines, each compiled by hytrain_fx: the bits of the same schedule by hand.

By hand each stage is compiled by torch alone, with the reference optimizer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import hytrain_fx
from hytrain_fx.capture.parallel_wrappers import as_stage
from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.explain.timeline.timeline import Timeline
from hytrain_fx.ir.task_graph import TaskKind

from . import pipeline_checkpoints, pipeline_loops, pipeline_plans
from .loops import assert_same
from .pipeline_loops import MICRO_BATCHES, SCHEDULES
from .pipeline_plans import require_fixed_plans
from .rank_loops import require_bits_by_hand, started

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_pipeline.py"
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {
    "GPipe": [("tied", BF16)],
    "1F1B": [("plain", BF16), ("accumulated short", BF16), ("clipped skipped", FP32), ("scaler", FP32), ("tied accumulated clipped", BF16)],
    "Interleaved1F1B": [("skipped", FP32), ("clipped", BF16), ("tied scaler clipped", FP32)],
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_have_the_bits_of_the_schedule_by_hand(schedule: str, tmp_path: Path) -> None:
    """Whatever the plan of each stage, which moves at every step; one rank is slow."""
    ranks = started(partial(pipeline_loops.every_loop, schedule, KINDS[schedule]), 2, tmp_path)
    assert all(len(loops) == len(KINDS[schedule]) for loops in ranks), ranks
    require_bits_by_hand(ranks, "seen")
    count = 4 if schedule == "Interleaved1F1B" else 2
    for rank, loops in enumerate(ranks):
        for loop, (_, ours) in loops.items():
            assert ours["left_out"] == [2 if "skipped" in loop else 0] * (count // 2), loop
            told = f"this model is stage {rank} of {count} in a Schedule{schedule} of 4 micro-batches"
            assert told in " ".join(ours["text"].split())


@pytest.mark.sample(0)
@pytest.mark.parametrize("eager", [(0, 1), (1,)], ids=str)
def test_a_tied_weight_of_stages_without_graphs(eager: tuple[int, ...], tmp_path: Path) -> None:
    """Its gradients are added up in every step, though no backward of a graph tells of one."""
    ranks = started(partial(pipeline_loops.eagerly, eager), 2, tmp_path)
    require_bits_by_hand(ranks, "seen")
    (first,), (last,) = (of.values() for of in ranks)
    assert torch.equal(first[1]["weights"]["words.weight"], last[1]["weights"]["head.weight"])


@pytest.mark.sample(0)
def test_fixed_plans_have_the_bits_of_the_schedule_by_hand(tmp_path: Path) -> None:
    """All states on the host, or some in each place; the number of micro-batches is any."""
    loops = pipeline_plans.LOOPS[:2]
    require_fixed_plans(started(partial(pipeline_plans.fixed_plans, loops, 1), 2, tmp_path), len(loops))


@pytest.mark.sample(0)
def test_four_stages_have_the_bits_of_the_schedule_by_hand(tmp_path: Path) -> None:
    """One factor clips all of them, an inf in one of them leaves the step out in all.

    The first one's embedding and the last one's head are one weight.
    """
    loop = "tied scaler clipped"
    ranks = started(partial(pipeline_loops.every_loop, "1F1B", [(loop, BF16)]), 4, tmp_path)
    require_bits_by_hand(ranks, "seen")
    ours = [loops[f"{loop} {BF16}"][1] for loops in ranks]
    norm_and_scale = ours[0]["seen"][-2:]
    assert all(of["seen"][-2:] == norm_and_scale for of in ours)
    assert norm_and_scale[1] == 2.0**14  # two of four steps were left out
    assert torch.equal(ours[0]["weights"]["words.weight"], ours[3]["weights"]["head.weight"])


@pytest.mark.sample(0)
def test_plans_are_solved_from_what_a_stage_measures(tmp_path: Path) -> None:
    """One micro-batch's forward and backward, the others between them, the wait between steps.

    Recorded steps of all stages are on one timeline, which every rank has.
    """
    ranks = started(pipeline_loops.planned, 2, tmp_path)
    assert ranks[0]["stages"] == ranks[1]["stages"]
    _require_order(ranks[0]["stages"])
    for found in ranks:
        profile = found["profile"]
        assert found["plan"] == "windowed"
        assert profile.between_us > profile.forward_us + profile.backward_us > 0  # three more micro-batches
        assert profile.bubble_us > 0
        assert re.search(r"other micro-batches +\d.*\n *other stages +\d", found["text"])


def _require_order(stages: Timeline) -> None:
    """Two steps of two stages: micro-batches go forwards through them, then backwards.

    A backward is told from where the work before it ended, so its wait is in it.
    """
    assert set(stages.lanes) == {"stage 0", "updates 0", "stage 1", "updates 1"}
    assert re.search(r"^stage 0 +\|f0.*\nupdates 0 .*\nstage 1 .*\nupdates 1 .*", stages.text(400))
    of_stages = [{kind: [span for span in stages.lanes[f"stage {number}"] if span.kind is kind]
                  for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)} for number in range(2)]
    for of in of_stages:
        assert all([span.unit for span in spans] == 2 * list(range(MICRO_BATCHES)) for spans in of.values())
    for kind, (first, second) in ((TaskKind.FORWARD, of_stages), (TaskKind.BACKWARD, of_stages[::-1])):
        for before, after in zip(first[kind], second[kind], strict=True):
            assert before.end_us <= after.end_us
            assert kind is TaskKind.BACKWARD or before.end_us <= after.begin_us


@pytest.mark.sample(0)
def test_a_gradient_goes_to_the_host_once_in_a_step(tmp_path: Path) -> None:
    """However many micro-batches there are, and none comes back, by whatever the schedule divides.

    Only in the first step the norms that clipping asks for are not known ahead.
    """
    for found in started(pipeline_loops.copies, 2, tmp_path):
        assert len(found) == 3
        for loop, steps in found.items():
            rows = steps[0][0]
            first = (rows, rows, rows if "clipped" in loop else 0)
            assert steps == [first, (rows, rows, 0), (rows, rows, 0)], loop


@pytest.mark.sample(0)
def test_stages_may_have_ranks_beside_them(tmp_path: Path) -> None:
    """Two pipelines of two stages: the gradients of a stage are averaged over both.

    An inf in one stage of one of them leaves the step out in all four.
    """
    ranks = started(pipeline_loops.beside_another, 4, tmp_path)
    require_bits_by_hand(ranks, "seen")
    for loop, (_, ours) in ranks[0].items():
        assert_same(ours["weights"], ranks[2][loop][1]["weights"])


@pytest.mark.sample(0)
def test_weights_that_cannot_be_tied_are_refused(tmp_path: Path) -> None:
    """On every rank alike. So is a backward after the sum of their gradients was taken.

    Every rank is told of gradients that are not finite, in whatever stage, and by none of its
    forwards.
    """
    of_ranks = started(pipeline_loops.refused, 2, tmp_path)
    assert of_ranks[0][:5] == of_ranks[1][:5]
    expected = (r"ConfigError: tie_weights: expected words\.weight in stages of two ranks or more, found it on 1",
                r"ConfigError: tie_weights: copies of words\.weight differ: .*'lr': 0\.0.* on rank 0, .*'lr': 1\.0.* on rank 1",
                r"UnsupportedError: tie_weights: words\.weight is in a parameter group with moments in bf16",
                r"UnsupportedError: tie_weights: words\.weight is tied already; name all its copies in one call",
                r"UnsupportedError: a backward came after the gradients of words\.weight, .*: run all backwards of a step first")
    for found, error in zip(of_ranks[0][:5], expected, strict=True):
        assert re.match(error, found)
    for errors, where in zip(of_ranks, (r"among them that of layers\.\d\.down\.bias", "in another stage"), strict=True):
        at_once, *between, late = errors[5:]
        for step, error in ((1, at_once), (2, late)):
            assert re.match(rf"NonFiniteGradientError: the gradients of step {step} hold NaN or infinite values \({where}\)", error)
        assert between == ["no error", "no error"]


@pytest.mark.sample(0)
def test_checkpoints_of_stages_are_those_of_the_model(tmp_path: Path) -> None:
    """Saved by stage, loaded by one process, and back: the same states and weights.

    The head is the embedding: two copies in the stages, one entry in the checkpoint.
    """
    by_stage, by_one = str(tmp_path / "by_stage"), str(tmp_path / "by_one")
    stages = started(partial(pipeline_checkpoints.saved_by_stage, by_stage), 2, tmp_path)
    loaded, saved = pipeline_checkpoints.whole_model(by_stage, by_one)
    _require_parts(stages, loaded)
    _require_parts(started(partial(pipeline_checkpoints.resumed_by_stage, by_one), 2, tmp_path), saved)


def _require_parts(stages: Any, whole: Any) -> None:
    """Stages have what the whole model has, each its part."""
    assert {name for of in stages for name in of["weights"]} == set(whole["weights"])
    for of in stages:
        assert_same(of["weights"], {name: whole["weights"][name] for name in of["weights"]})
        assert "head.weight" not in of["states"]
        for name, entry in of["states"].items():
            assert_same(entry, whole["states"][name])
    assert [sum("words.weight" in of["states"] for of in part) for part in (stages, [whole])] == [2, 1]


@pytest.mark.sample(0)
def test_the_example_trains() -> None:
    """As its text says, started by torchrun: the loss falls, and the norm is that of all stages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
               "--steps", "10", "--layers", "2", "--width", "32"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+), norm over 2 stages \d", run.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


# ---- one process ----


def _schedule(kind: Any) -> Any:
    """A schedule as far as it is read: a real one needs a process group. Its stage is a Linear."""
    made = kind.__new__(kind)
    made._n_microbatches, made._stage = 8, SimpleNamespace(stage_index=1, num_stages=3, submod=nn.Linear(2, 2), group=None)
    return made


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_a_stage_trains_without_the_default_group(kind: Any) -> None:
    """Other ranks have other stages. A group that is given averages."""
    schedule = _schedule(kind)
    made = as_stage(Config(pipeline=schedule), schedule._stage.submod)
    assert str(made.pipeline) == f"stage 1 of 3 in a {kind.__name__} of 8 micro-batches"
    assert made.process_group is False
    group = object()
    assert as_stage(Config(pipeline=schedule, process_group=group), schedule._stage.submod).process_group is group
    assert as_stage(Config(), schedule._stage.submod).process_group is None


def test_what_is_no_stage_is_refused() -> None:
    """Each error says what was found and what to hand over."""
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="this Linear is not compiled as a stage of a pipeline"):
        hytrain_fx.clip_grad_norm_(model, 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"pipeline='1F1B': expected None, or a schedule of torch\.distributed\.pipelining"):
        hytrain_fx.compile(model, optimizer, pipeline="1F1B")
    with pytest.raises(ConfigError, match="no stage of this Schedule1F1B on this rank has this model as its submod"):
        hytrain_fx.compile(model, optimizer, pipeline=_schedule(Schedule1F1B))
    with pytest.raises(UnsupportedError, match="found a ScheduleInterleavedZeroBubble, expected one of ScheduleGPipe"):
        hytrain_fx.compile(model, optimizer, pipeline=_schedule(ScheduleInterleavedZeroBubble))
    broken = _schedule(Schedule1F1B)
    del broken._n_microbatches
    with pytest.raises(UnsupportedError, match="keeps the stages of a Schedule1F1B elsewhere"):
        hytrain_fx.compile(broken._stage.submod, optimizer, pipeline=broken)
