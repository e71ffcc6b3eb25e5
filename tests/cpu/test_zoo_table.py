"""The zoo's command and its table, on hand-made rows."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import steps, zoo
from benchmarks.__main__ import main
from benchmarks.case import CannotRun, Case
from benchmarks.families import FAMILIES, build
from benchmarks.results import Results
from benchmarks.runner import Launch
from benchmarks.turns import Ask
from benchmarks.zoo_table import lines_of, zoo_markdown
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.named_devices import find_device

from .test_benchmarks import MACHINE, row_of

DEVICE = replace(find_device("h200"), host_memory_gb_per_s=300.0, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9,
                 sources={**find_device("h200").sources, "host_memory_gb_per_s": "measured: for a test"})
STEPS_S = {"floor": 0.05, "device": 0.06, "host": 0.2, "quarter": 0.08, "solved": 0.061, "torchao": 0.15}


def results_with(path: Path, steps: Mapping[str, float], device: DeviceSpec | None = DEVICE) -> Results:
    """Rows of gpt2 with these step times, on one machine."""
    results = Results(path)
    for name, case in zoo.cases_of("gpt2", list(steps)).items():
        results.put(case, row_of(case, steps[name]))
    if device is not None:
        results.put_device(MACHINE, device)
    return Results(path)


def test_the_rows_of_a_family_are_cases_of_its_large_size() -> None:
    """Batch and length are the size's; ours differs by its options."""
    found = zoo.cases_of("convnext", list(zoo.ROWS))
    assert found["floor"] == Case("floor", "convnext", 48, 224)
    assert found["quarter"] == Case("ours", "convnext", 48, 224, options=("gpu_states=0.25",))
    assert len({case.key for case in found.values()}) == len(zoo.ROWS)
    assert zoo.cases_of("convnext", ["solved"], small=True)["solved"].size == "convnext.small"


def test_a_row_of_a_family_trains_its_model() -> None:
    """`steps` takes a family's name, its batch and its length; a plain model cannot recompute."""
    parser = argparse.ArgumentParser()
    steps.add_arguments(parser)
    words = ["floor", "dlrm.small", "--batch", "8", "--sequence", "2", "--window", "1", "--warmup", "0"]
    row = steps.run(parser.parse_args(words))
    assert Case.of_row(row) == Case("floor", "dlrm.small", 8, 2)
    assert row["params"] == sum(p.numel() for p in build("dlrm.small", torch.device("cpu"), torch.bfloat16).parameters())
    assert row["step_s"] > 0
    with pytest.raises(CannotRun, match="leave --checkpointing out"):
        steps.run(parser.parse_args([*words, "--checkpointing"]))


def test_every_row_says_what_it_takes_and_solved_takes_most_of_the_device_but_device() -> None:
    """A row's memory grows with the states that it keeps on the GPU."""
    asks = {row: zoo.ask_of(row, case) for row, case in zoo.cases_of("moe", list(zoo.ROWS)).items()}
    assert asks["floor"].gpu_gb <= asks["host"].gpu_gb < asks["quarter"].gpu_gb < asks["solved"].gpu_gb < asks["device"].gpu_gb
    assert asks["device"].host_gb < asks["quarter"].host_gb < asks["host"].host_gb < asks["torchao"].host_gb


def test_the_table_has_the_limit_and_names_what_is_below_its_target(tmp_path: Path) -> None:
    """Host and quarter are held to their limits, solved to all on the GPU, host to torchao too."""
    results = results_with(tmp_path / "zoo.json", STEPS_S)
    (line,) = lines_of(results, "gpt2", zoo.cases_of("gpt2", list(zoo.ROWS)))
    assert line.host_limit is not None
    assert line.quarter_limit is not None
    assert line.host_limit.step_s > line.quarter_limit.step_s >= STEPS_S["floor"]
    below = list(line.below())
    assert [text.split(":")[0] for text in below] == ["`gpt2` host", "`gpt2` host"]
    assert f"{STEPS_S['host'] / line.host_limit.step_s:.2f} of its limit" in below[0]
    assert "torchao takes 0.75 of its time" in below[1]
    text = zoo_markdown(results, {"gpt2": zoo.cases_of("gpt2", list(zoo.ROWS))})
    assert all(f"{step_s:.4f}" in text for step_s in STEPS_S.values())
    assert "host memory 300 GB/s, link 20.0 GB/s to the device" in text


def test_launching_is_what_our_nodes_add_to_the_floor_s(tmp_path: Path) -> None:
    """A unit and step, of each row that tells it; one above the target is named."""
    cases = zoo.cases_of("gpt2", ["floor", "host", "solved"])
    results = Results(tmp_path / "zoo.json")
    for name, launching_s in {"floor": 0.080, "host": 0.085, "solved": 0.082}.items():
        results.put(cases[name], row_of(cases[name], STEPS_S[name], launching_s=launching_s, plan={"units": 50}))
    (line,) = lines_of(results, "gpt2", cases)
    assert line.launching_us("host") == pytest.approx(100.0)
    assert line.launching_us("quarter") is None
    assert [text for text in line.below() if "launch" in text] == [
        "`gpt2` host: our nodes take 100 us a unit to launch; at most 60 is wanted"]
    assert "host 100, solved 40 |" in zoo_markdown(results, {"gpt2": cases})


def test_there_is_no_limit_withoutmeasured_rates_or_without_the_floor(tmp_path: Path) -> None:
    """What is missing shows as a dash."""
    cases = zoo.cases_of("gpt2", list(zoo.ROWS))
    unmeasured = results_with(tmp_path / "a.json", STEPS_S, device=None)
    without_floor = results_with(tmp_path / "b.json", {"host": 0.2})
    for results in (unmeasured, without_floor):
        assert [line.host_limit for line in lines_of(results, "gpt2", cases)] == [None]
    assert "its rates were not measured" in zoo_markdown(unmeasured, {"gpt2": cases})


def test_rows_of_another_boot_stand_in_a_line_of_their_own(tmp_path: Path) -> None:
    """A limit is made of one machine's rates and rows."""
    results = results_with(tmp_path / "zoo.json", STEPS_S)
    case = zoo.cases_of("gpt2", ["host"])["host"]
    results.put(case, row_of(case, 0.1) | {"machine": {**MACHINE, "boot": "2"}})
    lines = lines_of(results, "gpt2", zoo.cases_of("gpt2", list(zoo.ROWS)))
    assert [set(line.rows) for line in lines] == [set(STEPS_S) - {"host"}, {"host"}]
    assert lines[1].host_limit is None


def test_a_call_measures_the_machine_once_and_then_row_after_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floors of all families come first, and all rows share the limit's seconds."""
    measured: list[str] = []
    rates: list[Path] = []

    def measure(cases: list[Case], results: Results, launch: Launch, *, retry: bool, asks: Mapping[str, Ask] | None) -> None:
        assert launch.total_s is not None
        assert launch.total_s <= 60
        measured.extend(case.key for case in cases)

    def device(logs: Path) -> DeviceSpec:
        rates.append(logs)
        return DEVICE

    monkeypatch.setattr(zoo, "measure", measure)
    monkeypatch.setattr(zoo, "measured_rates", device)
    words = ["zoo", "--families", "gpt2,dlrm", "--rows", "floor,host", "--limit-s", "60", "--out", str(tmp_path / "zoo.json")]
    for _ in range(2):
        assert main(words) == 0
    assert len(rates) == 1
    assert [key.split()[:2] for key in measured[:4]] == [["floor", "gpt2"], ["floor", "dlrm"], ["ours", "gpt2"], ["ours", "dlrm"]]


def test_rates_that_cannot_be_measured_are_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own error is in the message."""
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(2, command, stderr="found no compiler")

    monkeypatch.setattr(zoo.subprocess, "run", run)  # type: ignore[attr-defined]
    with pytest.raises(CannotRun, match=r"hytrain_fx profile .*found no compiler"):
        zoo.measured_rates(tmp_path)


def test_an_unknown_family_or_row_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists what there is."""
    parser = argparse.ArgumentParser()
    zoo.add_arguments(parser)
    for words in (["--families", "gpt2,nothing"], ["--rows", "ceiling"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
    told: Any = capsys.readouterr().err
    assert "found nothing, expected names of " + ", ".join(FAMILIES) in told
    assert "found ceiling, expected names of floor, device" in told
