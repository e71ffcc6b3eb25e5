"""The first screen of `explain`: its size, its verdict, and where the rest is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hytrain_fx
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan, prefix_plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.explain.plan.explained import Measured
from hytrain_fx.explain.plan.report import Explanation
from hytrain_fx.explain.plan.what_helps import MOST_TOKENS, tokens_to_hide
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.controller import Standing
from hytrain_fx.runtime.states.memory_estimate import MemoryEstimate, MemoryInUse

from ..null.profiles import prefix, profile_of, profiles, uniform, unit
from .explained import compiled

GB = 10**9
GPU = "NVIDIA H100 80GB HBM3"


def explained(profile: Profile | None, chosen: Plan) -> Explanation:
    """On a GPU, where nothing has been measured; states of 40 GB, of which 10 GB rest there."""
    estimate = MemoryEstimate(6 * GB, 10 * GB, 0, GB, GB, 30 * GB, 0, 0, 0, 40 * GB)
    memory = MemoryInUse(10 * GB, 30 * GB, GB, 50 * GB, 6 * GB, GB, estimate=estimate)
    return Explanation(chosen, (chosen,), profile, None, memory, "native", 12, 99, GPU)


def thirty_layers() -> tuple[Profile, Plan]:
    """30 layers that wait for the CPU, of different sizes and names; 100 MB hold the first few."""
    profile = profile_of([replace(unit(i, params=10**6 + i, cpu=3e3, gpu=1e2, d2h=1e2, h2d=1e2, forward=3e2, backward=6e2),
                                  name=f"decoder.stage_{'x' * i}.block.with_a_long_name") for i in range(30)])
    return profile, plan(profile, budget_bytes=10**8)


def measured(profile: Profile, step_us: float | None, stall_us: float = 0.0) -> Measured:
    """Forward and backward as profiled, all waits before the first unit."""
    times = [(u.forward_us, u.backward_us, u.cpu_update_us) for u in profile.units]
    forward_us, backward_us, cpu_us = zip(*times, strict=True)
    return Measured(9, forward_us, backward_us, (stall_us, *(0.0,) * (len(times) - 1)), cpu_us, step_us, 8)


def assert_fits(screen: str) -> None:
    """At most 40 lines of at most 100 columns; the last one names the rest."""
    lines = screen.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert ".details()" in lines[-1]
    assert ".to_dict()" in lines[-1]


@given(profile=profiles(), k=st.integers(0, 8), step_us=st.none() | st.floats(1.0, 1e9),
       notes=st.lists(st.text("ab ", max_size=400), max_size=9))
@settings(deadline=None, max_examples=40)
def test_every_explanation_fits_the_screen(profile: Profile, k: int, step_us: float | None, notes: list[str]) -> None:
    """Whatever is measured and noted: 40 lines of 100 columns at most, of them 5 of verdict."""
    chosen = replace(prefix(profile, min(k, len(profile.units))), notes=tuple(notes))
    found = replace(explained(profile, chosen), measured=measured(profile, step_us), device=GPU * 9)
    assert_fits(str(found))
    assert len(found.verdict.lines()) <= 5
    assert max(map(len, found.verdict.lines())) <= 100


def test_thirty_different_layers_fit_and_nothing_is_lost() -> None:
    """Units and notes without room on the screen are counted there, and are in the details."""
    profile, chosen = thirty_layers()
    notes = tuple(f"{number} {'note ' * 60}end" for number in range(9))
    found = replace(explained(profile, replace(chosen, notes=notes)), measured=measured(profile, 6e4),
                    planning=Standing("settled", "solved " * 30, 17, 1))
    screen, details = str(found), found.details()
    assert_fits(screen)
    assert "(25 more)" in screen
    assert "notes more)" in screen
    assert all(f"note: {note}" in details for note in notes)
    assert all(row.unit_name in details for row in chosen.rows[:20])
    assert str(found.planning) in details


def test_the_verdict_has_the_figures_of_the_cost_model() -> None:
    """The two ends are simulated, savings counted; the first change is what helps most."""
    profile, chosen = thirty_layers()
    found = replace(explained(profile, chosen), measured=measured(profile, 36_000.0, stall_us=7_000.0))
    verdict = found.verdict
    for us, k in ((verdict.all_on_device_us, 30), (verdict.all_on_host_us, 0)):
        assert us == simulate(profile, prefix_plan(profile.units, k, source="test", reason=lambda _: "")).makespan_us
    assert verdict.saved_bytes == 28 * GB  # of 40 GB, 10 GB rest there, ring and staging have 2 GB
    assert verdict.first_help == found.helps[0]
    assert verdict.above_compute_share == pytest.approx(36_000 / 27_000 - 1)
    assert verdict.tokens_to_hide == tokens_to_hide(profile, chosen, Discipline())
    first, ends, saved, binds, change = verdict.lines()
    assert first == "30 M parameters; 36 ms a step measured, 33% above forward and backward alone (27 ms)"
    assert ends.startswith("predicted: ")
    assert "(100 MB of 40 GB fit)" in ends
    assert saved == "28 GB saved on the device (counted): of 40 GB of states 10 GB rest there"
    assert binds.startswith("predicted: the CPU binds, the forward waits ")
    assert change.startswith(f"change first: {found.helps[0].change}: saves ")


def test_before_anything_is_measured_the_verdict_is_one_sentence() -> None:
    """It says so; nothing else is claimed."""
    _, chosen = thirty_layers()
    found = explained(None, replace(chosen, inputs={}, predicted={}))
    assert found.verdict.lines() == ["30 M parameters; no step is measured yet, so nothing is predicted either"]
    assert_fits(str(found))


def test_a_plan_that_has_not_run_yet_is_said_to_be_predicted() -> None:
    """The step has the predicted time, and the line says that none was measured."""
    profile, chosen = thirty_layers()
    line = explained(profile, chosen).verdict.lines()[0]
    assert "a step (predicted, not measured)" in line


def test_steps_without_a_profile_say_that_nothing_is_predicted() -> None:
    """Their measured time is told all the same."""
    profile, chosen = thirty_layers()
    found = replace(explained(None, replace(chosen, inputs={}, predicted={})), measured=measured(profile, 36_000.0))
    assert found.verdict.lines()[1] == "nothing is predicted yet: the times for that are not measured"
    assert "36 ms a step measured" in str(found)


def test_time_that_nothing_explains_points_at_the_loop() -> None:
    """It is first where more of a step is none of what is known than any change saves."""
    profile, chosen = thirty_layers()
    found = replace(explained(profile, chosen), measured=measured(profile, 90_000.0, stall_us=7_000.0))
    device_us = sum(u.gpu_update_us for u in profile.units[: chosen.k])
    assert found.verdict.loop_us == pytest.approx(90_000 - 27_000 - 7_000 - device_us)
    assert found.verdict.lines()[-1].startswith("look first at the loop: ")


def test_more_tokens_hide_the_waits_from_the_told_factor_on() -> None:
    """With a tenth less they do not; where 4 times as many do not, there is no factor."""
    profile, discipline = uniform(8, cpu=60.0, gpu=0.0), Discipline()
    chosen = prefix(profile, 1)
    times = tokens_to_hide(profile, chosen, discipline)
    assert times is not None
    assert 1 < times <= MOST_TOKENS

    def waits(factor: float) -> float:
        longer = profile_of([replace(u, forward_us=factor * u.forward_us, backward_us=factor * u.backward_us) for u in profile.units])
        step = simulate(longer, chosen, discipline)
        return step.stall_us / step.makespan_us

    assert waits(times) <= 0.01 < waits(times - 0.1)
    assert tokens_to_hide(uniform(8, cpu=9_000.0), chosen, discipline) is None


def test_a_small_model_is_shown_before_and_after_its_first_steps() -> None:
    """No graph is captured before the first call; on the CPU no device memory is saved."""
    with compiled(warmup_steps=1) as (model, step):
        before = hytrain_fx.explain(model)
        assert_fits(str(before))
        assert len(before.verdict.lines()) == 1
        assert before.verdict.params == sum(p.numel() for p in model.parameters())
        for _ in range(7):
            step()
        after = hytrain_fx.explain(model)
    assert_fits(str(after))
    assert after.verdict.step_us is not None
    assert after.verdict.predicted_step_us is not None
    assert "no device memory is saved: the device is the CPU itself" in str(after)


class Eager(nn.Module):
    """A forward that torch.compile captures nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()  # type: ignore[no-any-return]


def test_a_model_without_graphs_is_shown() -> None:
    """Its verdict is one sentence, and the reason is on the screen."""
    with compiled(lambda: (Eager(), [(torch.ones(2, 4),)])) as (model, step):
        for _ in range(9):
            step()
        found = hytrain_fx.explain(model)
    assert_fits(str(found))
    assert found.verdict.lines() == ["20 parameters; no step is measured yet, so nothing is predicted either"]
    assert "9 of 9 steps ran outside captured graphs" in str(found)


def test_values_are_plain_and_have_what_json_has() -> None:
    """`to_dict` is what `to_json` writes; what is not finite is None."""
    profile = uniform(3, cpu=0.0)
    found = explained(profile, plan(profile))
    assert found.alpha == math.inf
    values = found.to_dict()
    assert values == json.loads(found.to_json())
    assert values["profiled"]["alpha"] is None
    assert values["verdict"]["lines"] == found.verdict.lines()
    assert values["verdict"]["saved_bytes"] == 28 * GB
    assert all(f"{name} " in (Explanation.to_dict.__doc__ or "").replace(",", " ") for name in values)


class Cells(HTMLParser):
    """Collects texts of cells and of list entries, tags, and links."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.texts.setdefault(tag, []).append("")
        self.links += [name for name, _ in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag:
            self.texts[self._tag][-1] += data


def test_a_notebook_shows_the_verdict_and_all_tables() -> None:
    """The verdict is a list, the rest tables; names are escaped, and nothing is loaded."""
    profile = profile_of([replace(unit(0), name="<script>alert(1)</script>"), unit(1)])
    found = replace(explained(profile, plan(profile)), measured=measured(profile, 36_000.0))
    page = Cells()
    page.feed(html := found._repr_html_())
    assert page.texts["li"] == found.verdict.lines()
    assert "<script>alert(1)</script>" in page.texts["td"]
    assert "<script" not in html
    assert {"seed", "in force", "all, measured", "device: states resting there"} <= set(page.texts["td"])
    assert page.links == []
