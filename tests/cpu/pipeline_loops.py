"""What each rank of a pipeline does in test_pipelines.py: with hytrain_fx, and with torch alone.

A stage is a part of one model. Its parameters have the names that they have there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, weights
from .rank_loops import device_here
from .shard_loops import place_anywhere

WIDTH, WORDS, LAYERS, MICRO_BATCHES, STEPS = 32, 24, 4, 4, 4
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}
Found = dict[str, Any]


class Block(nn.Module):
    """A layer with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + added


class Part(nn.Module):
    """One stage: some layers of a model, the embedding with the first, the head with the last.

    Every part is made of the whole model's draws, so parts together are one model.
    """

    def __init__(self, number: int = 0, count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        words, layers, head = nn.Embedding(WORDS, WIDTH), [Block() for _ in range(LAYERS)], nn.Linear(WIDTH, WORDS, bias=False)
        each = LAYERS // count
        self.words = words if number == 0 else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(number * each, (number + 1) * each)})
        self.head = head if number == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.words is None else self.words(x)
        for layer in self.layers.values():
            x = layer(x)
        logits: torch.Tensor = x if self.head is None else self.head(x)
        return logits


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a step's micro-batches, and what is to come of them."""
    draw = torch.Generator("cpu").manual_seed(number)
    tokens = torch.randint(0, WORDS, (2 * MICRO_BATCHES, 9), generator=draw, device="cpu").to(device_here())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Pipeline:
    """The stages of one rank in a schedule, each with an optimizer: ours, or by hand.

    group   ranks of the pipeline
    beside  ours: ranks that train the same stages on other batches
    """

    def __init__(self, schedule: str, ours: bool, dtype: torch.dtype, group: Any = None, beside: Any = None, **options: Any) -> None:
        torch._dynamo.reset()
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        each = 2 if schedule == "Interleaved1F1B" else 1
        self.group, self.ours = group, ours
        self.parts = [Part(number, each * size).to(device_here(), dtype) for number in range(rank, each * size, size)]
        device = device_here()
        stages = [PipelineStage(part, rank + size * i, each * size, device, group=group) for i, part in enumerate(self.parts)]
        self.schedule = SCHEDULES[schedule](stages if each > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
        self.optimizers = [self._optimizer(part, beside, options) for part in self.parts]
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last

    def _optimizer(self, part: Any, beside: Any, options: Any) -> Any:
        if not self.ours:
            part.compile()
            return HandAdam(part.parameters(), **HYPER)
        plain = torch.optim.AdamW(part.parameters(), **HYPER)
        return hytrain_fx.compile(part, plain, pipeline=self.schedule, process_group=beside, workers=1, **options)[1]

    def backward(self, number: int, scale: float = 1.0) -> list[float]:
        """All micro-batches of a step: the losses, on the last stage's rank."""
        tokens, target = batch(number)
        losses: list[torch.Tensor] = []
        given = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*([tokens] if self.is_first else []), **given)
        return [loss.item() for loss in losses]

    def clip(self, most: float) -> float:
        """`clip_grad_norm_` over all stages: the same factor everywhere."""
        gradients = [p.grad for part in self.parts for p in part.parameters() if p.grad is not None]
        total = get_total_norm(gradients).float() ** 2
        distributed.all_reduce(total, group=self.group)
        for part in self.parts:
            clip_grads_with_norm_(part.parameters(), most, total.sqrt())
        return float(total.sqrt())

    def end_step(self) -> None:
        """step() and zero_grad() of all."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Of this rank's stages, by the whole model's names."""
        return {name: value for part in self.parts for name, value in weights(part).items()}

    def sessions(self) -> Iterator[Any]:
        """Of ours."""
        return (session_of(part) for part in self.parts)


def trained(schedule: str, loop: str, dtype: torch.dtype, group: Any, ours: bool, beside: Any = None) -> Found:
    """Four steps: losses and norms, weights, what `explain` says.

    Ours moves its states to a drawn plan before each step, and every second rank is slow.
    """
    pipeline = Pipeline(schedule, ours, dtype, group, beside, replan_every=0) if ours else Pipeline(schedule, ours, dtype, group)
    draw, seen = random.Random(distributed.get_rank()), list[float]()
    for session in pipeline.sessions() if ours and distributed.get_rank() % 2 else ():
        for stage in (Stage.LANDING, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
            session.engine.set_delay(stage, 300)
    for step in range(STEPS):
        for session in pipeline.sessions() if ours else ():
            if session.engine.can_stream:
                place_anywhere(session, draw)
        seen += pipeline.backward(step)
        if loop == "accumulated":
            seen += pipeline.backward(100 + step)
        if loop == "clipped":
            seen.append(pipeline.clip(0.5))
        pipeline.end_step()
    text = hytrain_fx.explain(pipeline.parts[0]).details() if ours else ""
    return {"seen": seen, "weights": pipeline.weights(), "text": text}


def every_loop(schedule: str, kinds: Sequence[tuple[str, torch.dtype]], rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Each loop by hand and with ours."""
    return {f"{loop} {dtype}": tuple(trained(schedule, loop, dtype, None, ours) for ours in (False, True)) for loop, dtype in kinds}


def planned(rank: int, size: int) -> Found:
    """Nine steps; the plan is solved from what the stage measures: profile, text of explain."""
    run = Pipeline("1F1B", True, torch.bfloat16, warmup_steps=2)
    for step in range(9):
        run.backward(step)
        run.end_step()
    (session,) = run.sessions()
    return {"profile": session.planning.profile, "text": hytrain_fx.explain(run.parts[0]).details(), "plan": session.planning.plan.source}


def beside_another(rank: int, size: int) -> tuple[Found, Found]:
    """Two pipelines of two stages: ranks 0 and 2 train the same stage on different batches."""
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    alike = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    pipeline, beside = pairs[rank // 2], alike[rank % 2]
    found = []
    for ours in (False, True):
        run = Pipeline("1F1B", ours, torch.bfloat16, pipeline, beside)
        for p in () if ours else run.parts[0].parameters():
            p.register_hook(partial(_averaged, beside))
        seen = []
        for step in range(STEPS):
            seen += run.backward(10 * (rank // 2) + step)
            run.end_step()
        found.append({"seen": seen, "weights": run.weights()})
    return found[0], found[1]


def _averaged(group: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The mean of one backward's gradients."""
    mean = gradient / 2
    distributed.all_reduce(mean, group=group)
    return mean


def saved_by_stage(folder: str, rank: int, size: int) -> Found:
    """Two steps, then a checkpoint of all stages."""
    run = Pipeline("1F1B", True, torch.bfloat16)
    for step in range(2):
        run.backward(step)
        run.end_step()
    return _saved(run.parts[0], run.optimizers[0], folder)


def whole_model(folder: str, into: str) -> tuple[Found, Found]:
    """One process loads that, trains a step on the whole model, and saves its own."""
    torch._dynamo.reset()
    model: Any = Part().to(torch.bfloat16)
    optimizer: Any = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), workers=1)[1]
    loaded = _resumed(model, optimizer, folder)
    tokens, target = batch(2)
    loss_of(model(tokens), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loaded, _saved(model, optimizer, into)


def resumed_by_stage(folder: str, rank: int, size: int) -> Found:
    """What each stage finds in a checkpoint of the whole model."""
    run = Pipeline("1F1B", True, torch.bfloat16)
    return _resumed(run.parts[0], run.optimizers[0], folder)


def _saved(model: nn.Module, optimizer: Any, folder: str) -> Found:
    found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
    save(found, checkpoint_id=folder)
    return {"states": found["optimizer"]["state"], "weights": found["model"]}


def _resumed(model: nn.Module, optimizer: Any, folder: str) -> Found:
    found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
    load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    optimizer.load_sharded_state_dict(found["optimizer"])
    return {"states": optimizer.sharded_state_dict()["state"], "weights": weights(model)}
