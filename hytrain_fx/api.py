"""The public functions: the one place that wires the rooms together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Never, TypeVar

import torch
from torch import nn

from hytrain_fx.capture.attention_masks import masks_in_words
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.capture.parallel_wrappers import as_stage
from hytrain_fx.capture.units import unit_of_rows
from hytrain_fx.config import Config, CpuShare, EngineName, Moments, OnNonfinite, Planner, Weights
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.graphs.inspected_graphs import InspectedGraph
from hytrain_fx.explain.graphs.inspection import Inspection
from hytrain_fx.explain.graphs.node_figures import InspectedRow, unit_times
from hytrain_fx.explain.plan.explained import THE_CPU, Measured
from hytrain_fx.explain.plan.report import Explanation
from hytrain_fx.explain.timeline.launching import launch_spans, step_launches
from hytrain_fx.explain.timeline.recording import Recording
from hytrain_fx.explain.timeline.timeline import Timeline, device_spans, from_records, from_schedule, lane_spans
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Plan
from hytrain_fx.loading.loaded import loaded
from hytrain_fx.runtime.launch_queue import length_asked_for
from hytrain_fx.session.call_gate import find_session, put_gate
from hytrain_fx.session.closing import close_model
from hytrain_fx.session.compiled_once import require_new
from hytrain_fx.session.method_call import called_of, remove_methods
from hytrain_fx.session.optimizer import OffloadedOptimizer, states_before
from hytrain_fx.session.session import Session
from hytrain_fx.session.state_dict import ParameterStates, load_states
from hytrain_fx.session.step_metrics import step_metrics
from hytrain_fx.session.weights_choice import choice_of, with_weights_chosen
from hytrain_fx.sharing.loop import share_in_words
from hytrain_fx.sharing.may_share import require_shareable
from hytrain_fx.torch_private.modules import compiled_call, set_compiled_call
from hytrain_fx.torch_private.names import require_release
from hytrain_fx.torch_private.options import known_options

M = TypeVar("M", bound=Callable[..., Any])  # a module, or a method of one


def compile(
    model: M,
    optimizer: torch.optim.Optimizer,
    *,
    k: int | Literal["auto"] = "auto",
    plan: Plan | None = None,
    planner: Planner = "windowed",
    stream: float | Literal["auto"] = "auto",
    gpu_states: float | int | Literal["auto"] = "auto",
    host_memory: int | None = None,
    speculate: bool | Literal["auto"] = "auto",
    shadow_memory: int | None = None,
    replan_every: int = 20,
    warmup_steps: int = 5,
    engine: EngineName = "auto",
    workers: int | None = None,
    pin_workers: bool = False,
    ring_bytes: int | None = None,
    autocast_copies: bool = True,
    on_nonfinite: OnNonfinite = "allow",
    moments: Moments | None = None,
    weights: Weights = "resident",
    cpu_share: CpuShare = 0,
    device: Any = None,
    loader: Any = None,
    process_group: Any = None,
    pipeline: Any = None,
    timeout_s: float = 120.0,
    passes: Sequence[Callable[..., Any]] | None = None,
    dump: str | Path | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **unknown: Never,
) -> tuple[M, OffloadedOptimizer]:
    """Compile `model` in place and take over `optimizer`; the loop around them stays as it is.

    Returns the same module object and an optimizer with the same `param_groups`; states of one that
    has run are taken along. All is solved from measured times. `Config` says more of each option.

    A loop that calls another method than `model(...)` hands over that one:
    `compile(model.training_step, optimizer)`. The model then has the compiled method by that name,
    and it is returned; its own call is compiled too. The method returns the loss: backward() and
    step() stay in the loop.

    k                units whose states rest on the device, "auto": solved
    plan             a saved Plan to obey instead of solving one
    planner          the rule that solves k: "windowed", "seed" or "cotrain"
    stream           share of the other states that visit the device to be updated, "auto": solved
    gpu_states       room for states on the device: "auto" (what is free), a fraction of them, or
                     bytes
    host_memory      bytes that states may take on the host, None: what is available
    speculate        whether updates by the CPU may begin before step(), on a guess
    shadow_memory    bytes on the host for such guesses, 0: none
    replan_every     steps within which a change of their length is followed, 0: never
    warmup_steps     steps measured before a plan is solved
    engine           "auto", "native", "torch" or "deepspeed"
    workers          CPU update threads, None: physical cores less the launching threads
    pin_workers      keep each of them on its own core
    ring_bytes       device memory for gradients on their way to the host
    autocast_copies  fp32 weights that autocast alone reads rest on the device in bf16
    on_nonfinite     a step with NaN or infinite gradients computes with them ("allow"), is left out
                     ("skip"), or is left out with an error ("raise")
    moments          in what states rest: "fp32", or "bf16" by chance; None: as parameter groups say
    weights          bf16 matrices rest on the device ("resident"), on the host ("streamed"), or in
                     shards of several ranks ("sharded", "sharded_host"); "auto": as they fit
    cpu_share        share of each batch that the CPU trains (`share`): a fraction, "auto": solved
    device           with `loader`: the device to train on
    loader           gives a model on the meta device its values: `from_safetensors(path)`, ...
    process_group    ranks that share out states of matrices, None: the default group, False: none
    pipeline         the schedule of torch.distributed.pipelining in which the model is a stage
    timeout_s        seconds after which a wait on a worker or a copy is an error
    passes           graph passes to run, None: DEFAULT_PASSES; yours: [*DEFAULT_PASSES, my_pass]
    dump             folder for each graph's text before and after each pass
    dynamic          handed on to torch.compile
    options          Inductor's, handed on too; not together with mode
    mode             handed on too, without CUDA graphs

    Raises ConfigError for an option that is unknown or does not fit, UnsupportedError for a model
    or an optimizer that is not supported, HostMemoryError where states do not fit the host,
    EngineError where the engine cannot be built or started.
    """
    require_release()
    config = Config.from_options(
        k=k, plan=plan, planner=planner, stream=stream, gpu_states=gpu_states, host_memory=host_memory, speculate=speculate,
        shadow_memory=shadow_memory, replan_every=replan_every, warmup_steps=warmup_steps, engine=engine, workers=workers,
        pin_workers=pin_workers, ring_bytes=ring_bytes, autocast_copies=autocast_copies, on_nonfinite=on_nonfinite, moments=moments,
        weights=weights, device=device, loader=loader, process_group=process_group, pipeline=pipeline, timeout_s=timeout_s, passes=passes,
        dump=dump, dynamic=dynamic, options=options, mode=mode, cpu_share=cpu_share, **unknown,
    )
    called = called_of(model)
    module = called.model
    config = as_stage(replace(config, options=known_options(config.mode, config.options)), module)
    require_new(module, optimizer)
    require_shareable(module, config)
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer.state, ParameterStates):
        optimizer.state.leave_groups()
    before = states_before(optimizer) if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state else None
    with loaded(module, optimizer, with_weights_chosen(module, optimizer, config)) as config:
        session = Session(module, optimizer, config)
    put_gate(module, session)
    ours = OffloadedOptimizer(optimizer, session)
    if before is not None:
        load_states(session, ours, before)
    if called.method is None:
        return model, ours
    return called.install(compiled_call(module)), ours


def close(model: nn.Module) -> None:
    """Finish committed updates, stop the threads and free what they used.

    The weights stay as trained, and the model is a plain one. Of several ranks each must call it.
    Where streamed weights do not fit the device, it is on the CPU then, and a warning says so.

    The optimizer's states can be read as long as the optimizer is kept, and are freed with it.
    Raises UnsupportedError for a model that is not compiled.
    """
    close_model(session_of(model), model)
    set_compiled_call(model, None)
    remove_methods(model)


def settle(model: nn.Module) -> None:
    """Return when every committed update is done and every weight of `model` shows it.

    Only for readers that this library cannot see: a raw pointer, or C++ code that keeps the
    parameter. Everybody else finds the new weights anyway. Of several ranks each must call it,
    before one of them reads weights alone. Raises UnsupportedError for a model that
    is not compiled, EngineError where the engine has failed.
    """
    session_of(model).settle()


def explain(model: nn.Module) -> Explanation:
    """The plan in force with its reasons, predicted next to measured times.

    `print` it for the first screen, `details()` for all the rest. `to_dict()` has the same as
    values, `to_json()` as text.

    Before times are measured it shows where the updates run meanwhile. On a GPU it waits for the
    device. Raises UnsupportedError for a model that is not compiled.
    """
    session = session_of(model)
    with session.turns.state:
        return _explanation(session)


def metrics(model: nn.Module, *, energy: bool = False) -> dict[str, float]:
    """What the last step took and where states are, as flat numbers for a logger.

    The keys are those of `hytrain_fx.session.step_metrics.METRICS`; a figure that is not known is
    left out. Nothing waits for the device.

    energy   the joules of the GPU and of the CPU too, since this was first asked for, where NVML
             and RAPL can be read

    `hytrain_fx.integrations.logging` hands them to wandb, TensorBoard and Prometheus. Raises
    UnsupportedError for a model that is not compiled.
    """
    session = session_of(model)
    with session.turns.state:
        return step_metrics(session, energy=energy)


def _explanation(session: Session) -> Explanation:
    planning, device, guesses = session.planning, session.table.device, session.engine.guess_counts()
    cuda = device.type == "cuda"
    return Explanation(
        plan=planning.plan,
        history=tuple(planning.history),
        profile=planning.profile, discipline=planning.discipline, measured=_measured(session),
        memory=session.resources.in_use(guesses.shadow_bytes),
        startup=session.startup,
        engine=session.engine.name, library=session.engine.library_origin, workers=session.engine.workers, steps_done=session.steps_done,
        device=torch.cuda.get_device_name(device) if cuda else THE_CPU,
        node_runs=dict(session.nodes.runs),
        not_offloaded={session.table.names[row]: why for row, why in sorted(_not_offloaded(session).items())},
        spent_us=_spent_us(session),
        optimizer=session.update.notes, guesses=guesses,
        copies=session.copies.in_words(), streamed=session.eager.streamed.in_words(), weights_choice=choice_of(session.config),
        nonfinite=session.finite_steps.in_words(session.steps_done), attention=masks_in_words(session.capture.graphs),
        outside=(*_outside(session), *share_in_words(session)), troubles=planning.aside.troubles,
        early=session.engine.early_counts(), early_tried=session.foresight.tried,
        stream=session.config.stream, launch_queue=length_asked_for() if cuda else None,
        planning=planning.controller.standing, units=planning.units(), kept_bytes=session.graphs.kept_bytes,
    )


def inspect(model: nn.Module) -> Inspection:
    """Every graph captured so far, before and after each pass, and the layer-level task graph.

    Times are those of `explain`.

    `print` it, ask it (`diff`, `annotated`, `find`, `counts`), or `save` it as .html, .json, .txt
    or .svg. On a GPU it waits for the device. Raises UnsupportedError for a model that is not
    compiled.
    """
    session = session_of(model)
    with session.turns.state:
        return _inspection(session)


def _inspection(session: Session) -> Inspection:
    unit_of = unit_of_rows(session.units)
    names = tuple(unit.name or "(model)" for unit in session.units)
    table, states = session.table, session.states
    rows = tuple(
        InspectedRow(name, names[unit_of[row]], states.travelling_bytes(row), states.params_by_place(row), states.traffic([row]),
                     table.parameters[row].nbytes if session.ranks else 0, row in table.shards and not table.has_owners,
                     row in table.shards and table.has_owners)
        for row, name in enumerate(table.names)
    )
    graphs = tuple(InspectedGraph(g.index, str(g.kind), g.rewrite.passes, g.rewrite.nodes) for g in session.capture.graphs)
    explanation = _explanation(session)
    return Inspection(graphs, rows, explanation.task_graph, names, unit_times(explanation, rows))


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Record every copy, update and collective of the steps inside; meanwhile the plan stays.
        with hytrain_fx.record(model) as recording:
            ...two or three steps...
        print(recording)                        # the last step, the predicted one under it
        recording.save("steps.json")            # all of them, for Perfetto or VizTracer; or .png

    The lanes of the launching thread and of the device hold the last 9 steps at most. Raises
    UnsupportedError for a model that is not compiled, and while the times for the first plan are
    being measured: both need the engine's records.
    """
    session = session_of(model)
    if session.planning.recording:
        raise UnsupportedError("this model is being recorded already; end that record block first")
    if session.planning.awaits_times and session.planning.is_about_to_measure:
        raise UnsupportedError(
            f"the times for the first plan are still being measured ({session.steps_done} steps are done, it takes "
            f"{session.planning.steps_to_measure}); record once explain(model) shows a solved plan"
        )
    session.drain()  # the previous step's updates are not of the block
    session.engine.take_records()  # of earlier steps
    schedule = explain(model).schedule
    names = tuple(unit.name for unit in session.planning.units())
    recording = Recording(from_schedule(schedule, names) if schedule else None)
    begin_us = time.perf_counter() * 1e6
    session.record(True)
    try:
        yield recording
        session.drain()
        with session.planning.aside("reading a recording"):
            recording.ended(_recorded(session, names, begin_us))
    finally:
        session.record(False)


def session_of(model: nn.Module) -> Session:
    """The session of a compiled model. Raises UnsupportedError for a model that is not compiled."""
    session = find_session(model) if isinstance(model, nn.Module) else None
    if session is None:
        raise UnsupportedError(f"this {type(model).__name__} is not compiled with hytrain_fx.compile()")
    return session


def _recorded(session: Session, names: tuple[str, ...], begin_us: float) -> Timeline:
    session.marks.settle()
    timed = session.nodes.fetched.times.take()
    clock_us = session.marks.clock.reading()
    device, launched = session.marks.finished(clock_us), session.marks.launched()
    spans = (*device_spans(device), *launch_spans(launched), *lane_spans(timed, clock_us, session.nodes.unit_of))
    launches = step_launches(device, launched)
    return from_records(session.engine.take_records(), spans, session.unit_of_rows, names, begin_us=begin_us, launches=launches)


def _measured(session: Session) -> Measured | None:
    """Times under the plan in force.

    Its first step is left out of the wall time: the states moved in it.
    """
    if session.marks.steps == 0:
        return None
    units = session.planning.units()
    times = session.marks.median(len(units))
    steps_us = list(session.step_us)[-(session.marks.steps - 1) :] if session.marks.steps > 1 else []
    cpu_update_us = tuple(_cpu_update_us(session, unit) for unit in range(len(units)))
    step_us = statistics.median(steps_us) if steps_us else None
    return Measured(session.marks.steps, cpu_update_us=cpu_update_us, step_us=step_us, step_count=len(steps_us),
                    finish=session.engine.finish_times(), **asdict(times))


def _cpu_update_us(session: Session, unit: int) -> float | None:
    unit_of = session.unit_of_rows
    rows = [row for row, place in session.states.placement.items() if unit_of[row] == unit and place.updates_on_cpu]
    return sum(session.engine.cpu_update_us(row) for row in rows) if rows else None


def _not_offloaded(session: Session) -> dict[int, str]:
    """Rows whose gradients do not go to the host inside a graph, and why."""
    graphs = session.capture.graphs
    found = {row: why for graph in graphs for row, why in graph.kept_grads.items()}
    for row in session.held.rows:
        found.setdefault(row, "its memory is held outside the model, so step() waits for its update")
    for row in session.eager.gradient_rows | session.eager.last_gradient_rows:
        found.setdefault(row, "its gradient came from outside the captured graphs")
    if any(graph.kind is GraphKind.BACKWARD for graph in graphs):
        offloaded = {row for graph in graphs for row in graph.grad_rows}
        for row in set(range(len(session.table))) - offloaded:
            found.setdefault(row, "no captured backward graph makes its gradient")
    return found


def _outside(session: Session) -> Iterator[str]:
    """What ran outside captured graphs, and what that costs."""
    if session.ranks:
        yield session.ranks.in_words(session.table.part_in_words)
    if session.config.pipeline:
        yield f"this model is {session.config.pipeline}"
    done, captured = session.steps_done, session.planning.captured_steps
    if captured < done:
        why = ("its gradients came from elsewhere (another method than the model's call, which hytrain_fx.compile(model.method, optimizer) "
               "captures, torch.func, gradients written by hand)"
               if session.capture.graphs else "torch.compile captured no graph (TORCH_LOGS=graph_breaks tells why)")
        yield (f"{done - captured} of {done} steps ran outside captured graphs: {why}. There updates begin at step(), and the next forward "
               f"waits for each where it reads the weight; step() itself took {time_text(session.in_step_us)} in the last step"
               + ("" if session.planning.profile else ", and no times could be measured to plan with"))
    yield from filter(None, (session.clock.collections.in_words(), session.planning.aside.in_words()))
    if breaks := list(session.capture.breaks):
        yield f"the forward is not one graph; torch.compile ends graphs at {_first_of(breaks, '; ')}"
    if session.marks.broken:
        held = _measured(session)
        took = f" ({time_text(held.held_us)} a step, measured)" if held else ""
        yield f"the forward waits for all new weights at its first graph break{took}: without a C++ compiler its reads are not seen"
    if read := session.eager.reads.read:
        names = [session.units[unit].name or "(model)" for unit in sorted(read)]
        yield (f"weights of {len(names)} of {len(session.units)} layers are read by code outside of graphs, and waited for there: "
               f"{_first_of(names, ', ')}")


def _first_of(texts: Sequence[str], between: str, most: int = 5) -> str:
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def _spent_us(session: Session) -> dict[str, float]:
    graphs, planning = session.capture.graphs, session.planning
    spent = {f"passes on {len(graphs)} graphs": sum(graph.rewrite_seconds for graph in graphs) * 1e6} if graphs else {}
    took = {"reading the last times": planning.read_us, "making the last plan": planning.solve_us}
    return spent | {what: us for what, us in took.items() if us}
