"""Timelines: what overlaps what, the three forms they take, and recording a running model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.explain.timeline.launching import launch_spans, step_launches
from hytrain_fx.explain.timeline.picture import COLOURS
from hytrain_fx.explain.timeline.span import COLLECTIVES, LAUNCHING, LETTERS, WORDS, LaunchKind, Span, share_inside, shared_time, tracks
from hytrain_fx.explain.timeline.timeline import Timeline, device_spans, from_records, from_schedule, read_trace
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import RESOURCE_OF, Resource, TaskKind
from hytrain_fx.planning.marks import Mark
from hytrain_fx.runtime.engine import Stage, TaskRecord

from ..null.profiles import prefix, profile_of, profiles, uniform, unit
from .explained import compiled

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8)


@given(spans=INTERVALS, others=INTERVALS)
@settings(deadline=None)
def test_shared_time_counts_each_instant(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """Time and share are those of unit cells inside the union of the others, for any overlap."""
    inside = {cell for begin, end in others for cell in range(begin, end)}
    cells = [cell for begin, end in spans for cell in range(begin, end)]
    expected = sum(cell in inside for cell in cells) / len(cells) if cells else None
    assert share_inside(spans, others) == pytest.approx(expected)
    assert shared_time(spans, others) == sum(cell in inside for cell in cells)


def test_only_cpu_updates_count_as_overlap() -> None:
    """Copies and updates on the device do not count; without CPU updates there is no share."""
    copies, forward = Span("D2H", TaskKind.D2H, 0, 50.0, 90.0), Span("device", TaskKind.FORWARD, 0, 5.0, 60.0)
    update = Span("CPU 0", TaskKind.CPU_UPDATE, 0, 0.0, 10.0)
    assert Timeline((update, forward, copies), ("layer",), "measured").overlap_share == 0.5
    assert Timeline((forward, copies), ("layer",), "measured").overlap_share is None


@given(profile=profiles(), data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_schedule_keeps_its_times_as_a_timeline(profile: Profile, data: st.DataObject) -> None:
    """Busy time of each resource, and the trace's durations, are the schedule's."""
    schedule = simulate(profile, prefix(profile, data.draw(st.integers(0, len(profile.units)))))
    timeline = from_schedule(schedule, [unit.name for unit in profile.units])
    for resource in Resource:
        kinds = [kind for kind, on in RESOURCE_OF.items() if on is resource]
        assert timeline.busy_us(*kinds) == pytest.approx(schedule.busy_us(resource))
    events = [event for event in json.loads(timeline.to_chrome_json())["traceEvents"] if event["ph"] == "X"]
    lengths_us = [interval.duration_us for interval in schedule.intervals]
    assert sum(event["dur"] for event in events) == pytest.approx(sum(lengths_us), abs=0.001 * len(lengths_us))  # whole nanoseconds
    assert {event["args"]["unit"] for event in events} <= {unit.name for unit in profile.units}


def check_trace(text: str, lanes: int) -> None:
    """What the Trace Event Format asks of complete events: types, order.

    Viewers ask that one thread does one thing at a time.
    """
    raw = json.loads(text)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names = set()
    for event in raw["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert set(threads) == names
    assert len(names) >= lanes
    assert len({thread for _, thread in names}) == len(names)
    for found in threads.values():
        assert found == sorted(found, key=lambda event: event[0])
        assert all(round(begin + length, 3) <= after for (begin, length), (after, _) in itertools.pairwise(found))


SPANS = st.lists(st.tuples(st.sampled_from(["H2D", "CPU 0"]), st.floats(0, 1e7), st.floats(0.01, 1e5)), min_size=1, max_size=20)


@given(SPANS)
@settings(deadline=None)
def test_no_thread_of_a_trace_does_two_things_at_once(found: list[tuple[str, float, float]]) -> None:
    """Copies that overlap on one lane are shown as two threads of its name.

    None is lost, and as few threads as possible are used.
    """
    spans = sorted((Span(lane, TaskKind.H2D, 0, at, at + length) for lane, at, length in found), key=lambda span: span.begin_us)
    timeline = Timeline(tuple(spans), ("layer",), "measured")
    check_trace(timeline.to_chrome_json(), len(timeline.lanes))
    for own in timeline.lanes.values():
        used = tracks(own)
        at_once = [sum(o.begin_us <= s.begin_us < o.end_us for o in own) for s in own]
        assert sorted(map(id, own)) == sorted(id(span) for track in used for span in track)
        assert len(used) == max(1, *at_once)


@given(profile=profiles(), width=st.integers(30, 200))
@settings(deadline=None, max_examples=30)
def test_the_text_keeps_its_width(profile: Profile, width: int) -> None:
    """No lane is wider than asked, and every lane is there."""
    timeline = from_schedule(simulate(profile, prefix(profile, 0)), [unit.name for unit in profile.units])
    lanes = timeline.text(width).splitlines()[: len(timeline.lanes)]
    assert all(len(line) <= width for line in lanes)
    assert [line.split()[0] for line in lanes] == list(timeline.lanes)


def test_the_text_of_a_small_schedule() -> None:
    """One character stands for one microsecond here.

    Labels stand where they fit, letters where they do not, gaps where nothing runs.
    """
    spans = (Span("device", TaskKind.BACKWARD, 1, 0.0, 10.0), Span("device", TaskKind.FORWARD, 0, 15.0, 20.0),
             Span("CPU 0", TaskKind.CPU_UPDATE, 1, 5.0, 7.0), Span("CPU 1", TaskKind.CPU_UPDATE, 1, 12.0, 20.0))
    lines = Timeline(spans, ("a", "b"), "measured").text(28).splitlines()
    assert lines[0] == "device  |b1-------     |f0--"
    assert lines[1] == "CPU 0        uu"
    assert lines[2] == "CPU 1               |u1-----"
    assert lines[4].startswith("70% of the CPU updates' time")


def test_marks_become_spans_by_the_rules_of_measuring() -> None:
    """Between two marks exactly one thing happened; a pair that means nothing leaves a gap."""
    marks = [(Mark.FORWARD_BEGIN, -1, 0.0), (Mark.WAIT_BEGIN, 0, 1.0), (Mark.WAIT_END, 0, 2.0), (Mark.FORWARD_END, -1, 5.0),
             (Mark.GRADS, 0, 9.0), (Mark.BACKWARD_END, -1, 10.0), (Mark.FORWARD_BEGIN, -1, 20.0)]
    found = [(span.kind, span.unit, span.begin_us, span.end_us) for span in device_spans([marks])]
    assert found == [(TaskKind.FORWARD, 0, 0.0, 1.0), (TaskKind.WAIT, 0, 1.0, 2.0), (TaskKind.FORWARD, 0, 2.0, 5.0),
                     (TaskKind.BACKWARD, 0, 5.0, 9.0), (TaskKind.BACKWARD, 0, 9.0, 10.0)]


HOST = [(Mark.FORWARD_BEGIN, -1, 0.0), (Mark.WAIT_BEGIN, 0, 1.0), (Mark.WAIT_END, 0, 6.0), (Mark.FORWARD_END, -1, 8.0),
        (Mark.GRADS, 0, 9.0), (Mark.BACKWARD_END, -1, 9.5), (Mark.STEP_BEGIN, -1, 10.0), (Mark.STEP_END, -1, 12.0)]
DEVICE = [(mark, unit, 10 * at) for mark, unit, at in HOST[:6]]  # a device that is ten times slower than it is launched


def test_the_launching_thread_has_a_lane() -> None:
    """Launches, the gate it was blocked in, and step(); what the loop itself does leaves a gap."""
    found = [(span.lane, span.kind, span.unit, span.begin_us, span.end_us) for span in launch_spans([HOST])]
    assert found == [(LAUNCHING, LaunchKind.FORWARD, 0, 0.0, 1.0), (LAUNCHING, LaunchKind.GATE, 0, 1.0, 6.0),
                     (LAUNCHING, LaunchKind.FORWARD, 0, 6.0, 8.0), (LAUNCHING, LaunchKind.BACKWARD, 0, 8.0, 9.0),
                     (LAUNCHING, LaunchKind.BACKWARD, 0, 9.0, 9.5), (LAUNCHING, LaunchKind.STEP, -1, 10.0, 12.0)]


@pytest.mark.parametrize(("later_us", "ended_at", "words"), [
    (0.0, (12.0 - 80.0) / 15.0, "68 us before the device's backward began"), (71.0, 0.2, "when 20% of the device's backward was done"),
    (93.0, (105.0 - 80.0) / 15.0, "10 us after the device's backward ended")])
def test_how_far_the_device_was_when_step_returned(later_us: float, ended_at: float, words: str) -> None:
    """The share is of the device's own backward, whichever thread is ahead.

    The longest stretch counts from the last gate on only.
    """
    (launch,) = step_launches([DEVICE], [[(mark, unit, at + later_us) for mark, unit, at in HOST]])
    assert launch.ended_at == pytest.approx(ended_at)
    assert (launch.longest_us, launch.longest_kind, launch.longest_unit) == (2.0, LaunchKind.FORWARD, 0)
    text = Timeline((Span("device", TaskKind.BACKWARD, 0, 0.0, 1.0),), ("layer",), "measured", (launch,)).text()
    assert f"optimizer.step() returned {words}" in text
    assert "longer than 2 us (launching the forward of layer)" in text


def test_a_backward_is_all_of_its_graphs_and_what_is_behind_them() -> None:
    """Two graphs, and two gradients of code behind them: the backward begins with the first graph.

    Of two micro-batches it is the last one's.
    """
    def device(*ends: tuple[int, float]) -> list[tuple[Mark, int, float]]:
        backward = [(mark, unit if mark is Mark.GRADS else -1, at) for unit, at in ends for mark in (Mark.GRADS, Mark.BACKWARD_END)]
        return [(Mark.FORWARD_BEGIN, -1, 0.0), (Mark.WAIT_BEGIN, 0, 0.0), (Mark.WAIT_END, 0, 0.0), (Mark.WAIT_BEGIN, 1, 5.0),
                (Mark.WAIT_END, 1, 5.0), (Mark.FORWARD_END, -1, 10.0), *backward]

    one = device((1, 20.0), (0, 30.0), (0, 50.0), (0, 50.0))
    again = [(mark, unit, at + 100.0) for mark, unit, at in device((1, 30.0), (0, 60.0))]
    host = [(mark, unit, 45.0) for mark, unit, _ in (*HOST[:6], (Mark.STEP_BEGIN, -1, 0.0), (Mark.STEP_END, -1, 0.0))]
    found = [step_launches([of], [host])[0] for of in (one, [*one, *again])]
    assert [(of.backward_begin_us, of.backward_end_us) for of in found] == [(10.0, 50.0), (110.0, 160.0)]
    assert found[0].ended_at == pytest.approx(35.0 / 40.0)


def test_a_wait_in_the_loop_before_step_is_the_longest_block() -> None:
    """A wait for the device between backward() and step() shows as the loop's own code.

    A step without either has no figures.
    """
    late = [(mark, unit, at + (30.0 if mark in (Mark.STEP_BEGIN, Mark.STEP_END) else 0.0)) for mark, unit, at in HOST]
    (launch,) = step_launches([DEVICE], [late])
    assert (launch.longest_us, launch.longest_kind) == (30.5, None)
    timeline = Timeline((Span("device", TaskKind.BACKWARD, 0, 0.0, 1.0),), ("layer",), "measured", (launch,))
    assert "(the loop's own code before step())" in timeline.text()
    assert timeline.longest_launch_us == 30.5
    assert step_launches([DEVICE, DEVICE[:4]], [HOST[:6], HOST]) == ()


def test_the_last_step_is_cut_at_the_begin_of_backwards() -> None:
    """The last step goes from one backward's begin to the next one's, from 0 on.

    Launches count from there; one step alone stays whole.
    """
    launches = step_launches([DEVICE, [(mark, unit, at + 200.0) for mark, unit, at in DEVICE]],
                             [HOST, [(mark, unit, at + 200.0) for mark, unit, at in HOST]])
    spans = (Span("device", TaskKind.FORWARD, 0, 60.0, 80.0), Span("device", TaskKind.BACKWARD, 0, 80.0, 95.0),
             Span("device", TaskKind.FORWARD, 0, 260.0, 290.0))
    timeline = Timeline(spans, ("layer",), "measured", launches)
    cut = timeline.last_step()
    assert cut.spans == (Span("device", TaskKind.BACKWARD, 0, 0.0, 15.0), Span("device", TaskKind.FORWARD, 0, 180.0, 200.0))
    assert cut.launches == (launches[0].moved(-80.0),)
    assert replace(timeline, launches=launches[:1]).last_step().spans == spans


def test_records_of_probes_and_of_earlier_steps_are_left_out() -> None:
    """Rows outside the model and times before the block are left out; a timeline starts at 0."""
    records = [TaskRecord(Stage.H2D, 0, 0, 0, 100.0, 110.0), TaskRecord(Stage.H2D, 5, 0, 0, 100.0, 110.0),
               TaskRecord(Stage.H2D, 0, 0, 0, 10.0, 20.0), TaskRecord(Stage.LANDING, 0, 0, 0, 100.0, 110.0)]
    timeline = from_records(records, [], {0: 3}, ["a"] * 4, begin_us=50.0)
    assert timeline.spans == (Span("H2D", TaskKind.H2D, 3, 0.0, 10.0),)
    assert from_records([], [], {}, []).text() == "measured: nothing was recorded"


def rounded(timeline: Timeline) -> Timeline:
    """Times as files have them: whole nanoseconds."""
    spans = (replace(span, begin_us=round(span.begin_us, 3), end_us=round(span.end_us, 3)) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))


def test_files_are_traces_or_pictures(tmp_path: Path) -> None:
    """A trace holds one process a timeline and one named thread a lane.

    A picture is a PNG, and other suffixes are refused.
    """
    profile = uniform(3)
    timelines = [from_schedule(simulate(profile, prefix(profile, k)), ["a", "b", "c"]) for k in (0, 3)]
    text = timelines[0].save(tmp_path / "t.json", timelines[1]).read_text()
    check_trace(text, sum(len(timeline.lanes) for timeline in timelines))
    events = json.loads(text)["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1]
    assert names == list(timelines[0].lanes) == ["device", "D2H", "CPU", "H2D"]
    assert [read.lanes for read in read_trace(tmp_path / "t.json")] == [rounded(timeline).lanes for timeline in timelines]
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match="no trace that"):
        read_trace(tmp_path / "other.json")
    pytest.importorskip("matplotlib")
    assert timelines[0].save(tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"'\.svg'"):
        timelines[0].save(tmp_path / "t.svg")


def test_recording_a_running_model() -> None:
    """Each unit's copy out, and each row's update and copy back, is there in each step.

    The device's own forwards and backwards are there too.
    """
    with compiled(k=1, warmup_steps=3) as (model, step):  # one step may have no update in it
        for _ in range(6):  # what is predicted for the given k is measured first
            step()
        with hytrain_fx.record(model) as recording:
            with pytest.raises(UnsupportedError, match="has not ended"):
                _ = recording.timeline
            with pytest.raises(UnsupportedError, match="recorded already"), hytrain_fx.record(model):
                pass
            step()
            step()
        session = session_of(model)
        check_trace(recording.timeline.to_chrome_json(), len(recording.timeline.lanes))
        assert COLLECTIVES not in recording.timeline.lanes  # nothing goes from rank to rank in one process
        workers = [spans for lane, spans in recording.timeline.lanes.items() if lane.startswith("CPU")]
        assert workers
        assert all(len(tracks(spans)) == 1 for spans in workers)  # one update at a time
        on_host = sum(len(unit.rows) for unit in session.units[1:])
        step()
        assert session.engine.take_records() == []
    kinds = [span.kind for span in recording.timeline.spans]
    for kind in (TaskKind.CPU_UPDATE, TaskKind.H2D):
        assert kinds.count(kind) == 2 * on_host
    assert kinds.count(TaskKind.D2H) == 2 * len(session.units[1:])
    assert kinds.count(TaskKind.GPU_UPDATE) == 2 * len(session.units[0].rows)  # one launch a step, of which each row has its part
    assert kinds.count(LaunchKind.STEP) == len(recording.timeline.launches) == 2
    assert {span.unit for span in recording.timeline.spans if span.kind is LaunchKind.GATE} == {0, 1, 2, 3}
    assert recording.timeline.step_ended_at is not None
    assert recording.timeline.step_ended_at > 1  # on the CPU the launching thread is the device
    assert {span.unit for span in recording.timeline.spans if span.kind is TaskKind.FORWARD} == {0, 1, 2, 3}
    printed = str(recording)
    assert printed.index("measured") < printed.index("predicted") < printed.index("optimizer.step() returned")
    assert recording.timeline.unit_names == ("first", "body.0", "body.2", "last")
    assert recording.predicted is not None


def test_recording_waits_for_the_first_plan_and_does_not_disturb_the_next() -> None:
    """While times for the first plan are measured, recording is refused.

    Afterwards no plan is made inside the block.
    """
    with compiled(warmup_steps=3, replan_every=1) as (model, step):
        step()
        with pytest.raises(UnsupportedError, match=r"1 steps are done, it takes 5"):
            hytrain_fx.record(model).__enter__()
        for _ in range(5):
            step()
        planning = session_of(model).planning
        profile = planning.profile
        with hytrain_fx.record(model) as recording:
            for _ in range(3):
                step()
        assert planning.profile is profile
        assert recording.predicted is not None
        assert recording.predicted.source == "predicted"
        session_of(model).engine.set_delay(Stage.H2D, 20_000)  # where steps do not change, nothing is measured
        for _ in range(8):
            step()
        assert planning.profile is not profile


def test_streamed_states_have_lanes_and_letters() -> None:
    """Every kind of span has a letter and a colour; one letter stands for one word.

    Streamed states are measured on lanes beside the copies, and predicted on the link's own.
    """
    assert set(LETTERS) == set(WORDS) == set(COLOURS) == {*TaskKind, *LaunchKind}
    assert len(set(LETTERS.values())) == len(set(WORDS.values())) == len({(LETTERS[kind], WORDS[kind]) for kind in WORDS})
    stages = (Stage.STREAM_IN, Stage.GPU_UPDATE, Stage.STREAM_OUT)
    records = [TaskRecord(stage, 0, 0, 0, 10.0 * i, 10.0 * i + 5) for i, stage in enumerate(stages)]
    measured = from_records(records, [], {0: 0}, ["layer"])
    assert {lane: [span.label for span in spans] for lane, spans in measured.lanes.items()} == {
        "device updates": ["U0"], "D2H states": ["o0"], "H2D states": ["i0"]}
    profile = profile_of([unit(0, stream=5.0, gpu=2.0)])
    plan = prefix_plan(profile.units, 0, source="test", reason=lambda _: "", share=1.0)
    predicted = from_schedule(simulate(profile, plan), ["layer"])
    assert [span.label for span in predicted.lanes["H2D"]] == ["i0"]
    assert [span.label for span in predicted.lanes["D2H"]] == ["o0"]
    assert "o0" in predicted.to_chrome_json()
