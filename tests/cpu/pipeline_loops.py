"""What each rank of a pipeline does in test_pipelines.py: with hytrain_fx, and with torch alone.

A stage is a part of one model. Its parameters have the names that they have there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import ConfigError, NonFiniteGradientError, UnsupportedError
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, weights
from .rank_loops import device_here, norm_in_shards
from .shard_loops import place_anywhere

WIDTH, WORDS, LAYERS, MICRO_BATCHES, STEPS = 32, 24, 4, 4, 4
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}
TIED = ("words.weight", "head.weight")
SPIKE = 3e38
"""A factor with which the gradient of one bias overflows, and nothing else does."""
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

    link   the device that what comes to a stage is on, and what it hands to the next one: gloo
           sends from host memory alone
    """

    def __init__(self, number: int = 0, count: int = 1, link: torch.device | None = None) -> None:
        super().__init__()
        self.link = device_here() if link is None or number == count - 1 else link
        torch.manual_seed(0)
        words, layers, head = nn.Embedding(WORDS, WIDTH), [Block() for _ in range(LAYERS)], nn.Linear(WIDTH, WORDS, bias=False)
        each = LAYERS // count
        self.words = words if number == 0 else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(number * each, (number + 1) * each)})
        self.head = head if number == count - 1 else None
        self.spike: torch.Tensor
        self.register_buffer("spike", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.spike.device)
        x = x if self.words is None else self.words(x)
        for layer in self.layers.values():
            x = layer(x)
            bias = layer.get_parameter("down.bias") * self.spike
            x = x + (bias - bias.detach())
        logits: torch.Tensor = x if self.head is None else self.head(x)
        return logits.to(self.link)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def batch(number: int, micro_batches: int = MICRO_BATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a step's micro-batches, and what is to come of them."""
    draw = torch.Generator("cpu").manual_seed(number)
    tokens = torch.randint(0, WORDS, (2 * micro_batches, 9), generator=draw, device="cpu").to(device_here())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Pipeline:
    """The stages of one rank in a schedule, each with an optimizer: ours, or by hand.

    group   ranks of the pipeline
    beside  two ranks that train the same stages on other batches
    scaled  with a GradScaler
    tied    the head is the embedding
    skips   steps with gradients that are not finite are left out (`on_nonfinite`)

    factor  of the loss
    """

    def __init__(self, schedule: str, ours: bool, dtype: torch.dtype, group: Any = None, beside: Any = None, *, scaled: bool = False,
                 tied: bool = False, skips: bool = False, micro_batches: int = MICRO_BATCHES, **options: Any) -> None:
        torch._dynamo.reset()
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        each = 2 if schedule == "Interleaved1F1B" else 1
        self.group, self.beside, self.ours, self.tied, self.micro_batches = group, beside, ours, tied, micro_batches
        device = device_here()
        link = torch.device("cpu") if "gloo" in distributed.get_backend_config(group) else device
        self.parts = [Part(number, each * size, link).to(device, dtype) for number in range(rank, each * size, size)]
        stages = [PipelineStage(part, rank + size * i, each * size, link, group=group) for i, part in enumerate(self.parts)]
        self.skips, self.factor = skips, 1.0
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16, growth_interval=2, enabled=scaled)
        self.scaler.scale(torch.ones(1, device=device))  # a scaler begins with its first loss, and most stages have none
        self.schedule = SCHEDULES[schedule](stages if each > 1 else stages[0], micro_batches, loss_fn=self._loss)
        self.optimizers = [self._optimizer(part, beside, options) for part in self.parts]
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last
        if tied and ours:
            hytrain_fx.tie_weights(self.parts, [TIED])
        elif tied:
            self._begin_tied()

    def _optimizer(self, part: Any, beside: Any, options: Any) -> Any:
        if not self.ours:
            part.compile()
            return HandAdam(part.parameters(), **HYPER)
        plain = torch.optim.AdamW(part.parameters(), **HYPER)
        options = {"on_nonfinite": "skip" if self.skips else "allow", **options}
        return hytrain_fx.compile(part, plain, pipeline=self.schedule, process_group=beside, workers=1, **options)[1]

    def _loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * self.scaler.scale(loss_of(logits, target))

    def backward(self, number: int, scale: float = 1.0) -> list[float]:
        """All micro-batches of a step: the losses, on the last stage's rank."""
        tokens, target = batch(number, self.micro_batches)
        losses: list[torch.Tensor] = []
        given = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*([tokens.to(self.parts[0].link)] if self.is_first else []), **given)
        return [loss.item() for loss in losses]

    def before_step(self) -> None:
        """By hand: the sum of the tied weight's gradients, the same inf everywhere."""
        if self.ours:
            return
        if self.tied:
            copy, size = self._tied_copy(), (WORDS, WIDTH)
            summed = torch.zeros(size, dtype=next(self.parts[0].parameters()).dtype, device=device_here()) if copy is None else copy.grad
            distributed.all_reduce(summed, group=self.group)
        if self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            found = [of for optimizer in self.optimizers
                     for of in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
            worst = torch.stack(found).amax()
            distributed.all_reduce(worst, distributed.ReduceOp.MAX, group=self.group)
            for of in found:
                of.fill_(worst)

    def clip(self, most: float) -> float:
        """`clip_grad_norm_` over all stages: the same factor everywhere."""
        if self.ours:
            for optimizer in self.optimizers if self.scaler.is_enabled() else ():
                self.scaler.unscale_(optimizer)
            return float(hytrain_fx.clip_grad_norm_(self.parts, most))
        head = self.parts[-1].head if self.tied else None
        counted = [p for part in self.parts for p in part.parameters() if head is None or p is not head.weight]
        norm = get_total_norm([p.grad for p in counted if p.grad is not None]) if self.beside is None else norm_in_shards(2, counted)
        own = norm.double().reshape(1)
        of_ranks = [torch.empty_like(own) for _ in range(distributed.get_world_size(self.group))]
        distributed.all_gather(of_ranks, own, group=self.group)
        total = torch.linalg.vector_norm(torch.cat(of_ranks)).float()
        for part in self.parts:
            clip_grads_with_norm_(part.parameters(), most, total)
        return float(total)

    def end_step(self) -> float:
        """step() and zero_grad() of all. Gives the next scale."""
        if self.skips and not self.ours:
            self._skip()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.scaler.get_scale()

    def _skip(self) -> None:
        """By hand: no gradients, where one of any stage is not finite."""
        parameters = [p for part in self.parts for p in part.parameters()]
        bad = torch.stack([~p.grad.isfinite().all() for p in parameters if p.grad is not None]).any().float()
        distributed.all_reduce(bad, distributed.ReduceOp.MAX, group=self.group)
        for p in parameters if bad else ():
            p.grad = None

    def spike(self, factor: float, number: int) -> None:
        """In the first stage (0) or in the last one (-1)."""
        if self.is_last if number else self.is_first:
            self.parts[number].get_buffer("spike").fill_(factor)

    def _begin_tied(self) -> None:
        """The last rank's head gets the values of the first one's embedding."""
        copy = self._tied_copy()
        values = torch.zeros((WORDS, WIDTH), dtype=next(self.parts[0].parameters()).dtype, device=device_here())
        if self.is_first and copy is not None:
            values.copy_(copy.detach())
        distributed.all_reduce(values, group=self.group)
        if self.is_last and copy is not None:
            with torch.no_grad():
                copy.copy_(values)

    def _tied_copy(self) -> Any:
        part = self.parts[0].words if self.is_first else self.parts[-1].head if self.is_last else None
        return None if part is None else part.weight

    def weights(self) -> dict[str, torch.Tensor]:
        """Of this rank's stages, by the whole model's names."""
        return {name: value for part in self.parts for name, value in weights(part).items()}

    def sessions(self) -> Iterator[Any]:
        """Of ours."""
        return (session_of(part) for part in self.parts)


def trained(schedule: str, loop: str, dtype: torch.dtype, group: Any, ours: bool, beside: Any = None, *,
            micro_batches: int = MICRO_BATCHES, **plan: Any) -> Found:
    """Four steps: losses, norms and scales, weights, what `explain` says.

    loop   "accumulated", "clipped", "scaler", "tied", "skipped", "short" of memory after two steps,
           or several of them

    Ours moves its states to a drawn plan before each step, unless a `plan` is given, as options of
    compile. Every second rank is slow. With a scaler, and where steps are skipped, the second step
    has an inf in the first stage alone, the third one in the last; of two pipelines side by side
    only the first has them.
    """
    of_loop: dict[str, Any] = {"scaled": "scaler" in loop, "tied": "tied" in loop, "skips": "skipped" in loop}
    options = {**of_loop, "micro_batches": micro_batches, **plan}
    pipeline = Pipeline(schedule, ours, dtype, group, beside, replan_every=0 if ours else 20, **options)
    for p in () if ours or beside is None else pipeline.parts[0].parameters():
        p.register_hook(partial(_averaged, beside))
    stream = distributed.get_rank() // distributed.get_world_size(group)  # which batches
    draw, seen = random.Random(distributed.get_rank(group)), list[float]()  # ranks beside each other have one plan
    for session in pipeline.sessions() if ours and distributed.get_rank() % 2 else ():
        for stage in (Stage.LANDING, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
            session.engine.set_delay(stage, 300)
    for step in range(STEPS):
        for session in pipeline.sessions() if ours else ():
            if session.engine.can_stream and not plan:
                place_anywhere(session, draw)
        spiked = {1: 0, 2: -1}.get(step) if ("scaler" in loop or "skipped" in loop) and not stream else None
        if spiked is not None:
            pipeline.spike(SPIKE, spiked)
            pipeline.factor = 2.0**16 if "skipped" in loop else 1.0
        if "short" in loop and step == 2:
            assert not ours or all(session.nodes.gradients.stream_out() for session in pipeline.sessions())
        seen += pipeline.backward(10 * stream + step)
        if spiked is not None:
            pipeline.spike(0.0, spiked)
            pipeline.factor = 1.0
        if "accumulated" in loop:
            seen += pipeline.backward(100 + step)
        pipeline.before_step()
        if "clipped" in loop:
            norm = pipeline.clip(0.5)
            seen.append(norm if math.isfinite(norm) else math.inf)
        seen.append(pipeline.end_step())
    text = hytrain_fx.explain(pipeline.parts[0]).details() if ours else ""
    left_out = [session.finite_steps.count for session in pipeline.sessions()] if ours else []
    places = {str(of.placement) for session in pipeline.sessions() for of in session.states.placed} if ours else set()
    return {"seen": seen, "weights": pipeline.weights(), "text": text, "places": places, "left_out": left_out}


def every_loop(schedule: str, kinds: Sequence[tuple[str, torch.dtype]], rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Each loop by hand and with ours."""
    return {f"{loop} {dtype}": tuple(trained(schedule, loop, dtype, None, ours) for ours in (False, True)) for loop, dtype in kinds}


def eagerly(eager: Sequence[int], rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """A tied weight whose stages on these ranks have no compiled graph."""
    if rank in eager:
        setattr(Part, "forward", torch.compiler.disable(Part.forward))  # noqa: B010  # mypy: a method
    return every_loop("1F1B", [("tied clipped", torch.float32)], rank, size)


def copies(rank: int, size: int) -> dict[str, list[tuple[int, int, int]]]:
    """By loop: rows, gradients sent to the host and brought back, in each of three steps.

    Every state is on the host. One schedule has four micro-batches, the other three.
    """
    found: dict[str, list[tuple[int, int, int]]] = {}
    for schedule, micro_batches, loop in (("GPipe", 3, "clipped"), ("1F1B", 4, "clipped"), ("1F1B", 4, "plain")):
        run = Pipeline(schedule, True, torch.bfloat16, micro_batches=micro_batches, k=0, stream=0, replan_every=0)
        (session,) = run.sessions()
        counts = _Counts(session.engine)
        of_steps = found[f"{schedule} {loop}"] = []
        for step in range(3):
            counts.sent = counts.fetched = 0
            run.backward(step)
            if loop == "clipped":
                run.clip(0.5)
            run.end_step()
            of_steps.append((len(session.table), counts.sent, counts.fetched))
        hytrain_fx.close(run.parts[0])
    return found


class _Counts:
    """Counts the rows that an engine is told to bring to the host and back."""

    def __init__(self, engine: Any) -> None:
        self.sent = self.fetched = 0
        self._send, self._fetch = engine.grad_offload, engine.fetch
        engine.grad_offload, engine.fetch = self._sends, self._fetches

    def _sends(self, rows: Sequence[int], grads: Any) -> None:
        self.sent += len(rows)
        self._send(rows, grads)

    def _fetches(self, rows: Sequence[int], into: Any) -> Any:
        self.fetched += len(rows)
        return self._fetch(rows, into)


def refused(rank: int, size: int) -> list[str]:
    """The errors of weights that cannot be tied, and of a backward after their sum.

    Then that of a step for which the first stage alone has gradients that are not finite. It is
    told at once, and then, as on a GPU, when the next step is asked for.
    """
    run = Pipeline("1F1B", True, torch.bfloat16)
    (group,) = run.optimizers[0].param_groups
    errors = [_error_of(lambda: hytrain_fx.tie_weights(run.parts, [TIED[:1]]))]
    for key, other in (("lr", group["lr"] + rank), ("moments", "bf16")):
        before = dict(group)
        group[key] = other
        errors.append(_error_of(lambda: hytrain_fx.tie_weights(run.parts, [TIED])))
        group.clear()
        group.update(before)
    hytrain_fx.tie_weights(run.parts, [TIED])
    errors.append(_error_of(lambda: hytrain_fx.tie_weights(run.parts, [TIED])))
    run.backward(0)
    run.clip(0.5)
    run.backward(1)
    errors.append(_error_of(lambda: run.clip(0.5)))
    run = Pipeline("1F1B", True, torch.float32, on_nonfinite="raise")
    run.factor = 2.0**16
    run.spike(SPIKE, 0)
    run.backward(0)
    errors.append(_error_of(run.end_step))
    run.optimizers[0].zero_grad()
    next(iter(run.sessions())).finite_steps.reads_at_once = False
    run.backward(1)
    errors.append(_error_of(run.end_step))
    run.spike(1.0, 0)
    errors.append(_error_of(lambda: run.backward(2)))
    errors.append(_error_of(run.end_step))
    return errors


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, UnsupportedError, NonFiniteGradientError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def planned(rank: int, size: int) -> Found:
    """Nine steps; the plan is solved from what the stage measures: profile, text of explain.

    Then two recorded steps of all stages.
    """
    run = Pipeline("1F1B", True, torch.bfloat16, warmup_steps=2)
    for step in range(9):
        run.backward(step)
        run.end_step()
    (session,) = run.sessions()
    found = {"profile": session.planning.profile, "text": hytrain_fx.explain(run.parts[0]).details(), "plan": session.planning.plan.source}
    with hytrain_fx.record(run.parts[0]) as recording:
        for step in range(2):
            run.backward(step)
            run.end_step()
    return {**found, "stages": hytrain_fx.stages_timeline(run.parts, recording)}


def beside_another(rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Two pipelines of two stages: ranks 0 and 2 train the same stage on different batches."""
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    alike = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    groups = pairs[rank // 2], alike[rank % 2]
    return {loop: tuple(trained("1F1B", loop, torch.float32, groups[0], ours, groups[1]) for ours in (False, True))
            for loop in ("clipped", "tied scaler")}


def _averaged(group: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The mean of one backward's gradients."""
    mean = gradient / 2
    distributed.all_reduce(mean, group=group)
    return mean
