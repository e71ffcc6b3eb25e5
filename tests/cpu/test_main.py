"""The command line: every command's output is what the library's own values say."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from hytrain_fx.__main__ import main
from hytrain_fx.explain.plan.text import plan_text
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.report import report
from hytrain_fx.forecast.verdict import verdict
from hytrain_fx.ir.plan import Plan
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import SOURCES

WHERE = ["--device", "h200", "--tokens", "4096"]
MODEL = ["--model", "llama-1.3b", *WHERE]
# A report of it takes a fraction of the time, and is made of the same parts.
SMALL = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 4096}


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The path of the config of a model of four layers."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_report_prints_the_report(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown by default, JSON on request, with the budget in powers of 1000."""
    expected = report(small, "h200", 4096, budget_bytes=250_000_000)
    asked = ["--model", small, *WHERE, "--budget-gb", "0.25"]
    assert expected.ours.k < len(expected.profile.units)  # the budget decides
    assert output(capsys, "report", *asked) == markdown(expected) + "\n"
    assert output(capsys, "report", *asked, "--json") == expected.to_json() + "\n"


def test_plan_prints_the_plan_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of `explain`, or JSON that `compile(plan=)` takes, under the same options."""
    expected = report("llama-1.3b", "h200", 4096, budget_bytes=2_500_000_000, sweep=False).plan
    assert output(capsys, "plan", *MODEL, "--budget-gb", "2.5") == plan_text(expected) + "\n"
    assert Plan.from_json(output(capsys, "plan", *MODEL, "--budget-gb", "2.5", "--json")) == expected
    other = report("llama-1.3b", "h200", 4096, sequence=512, recompute=True, sweep=False).plan
    assert output(capsys, "plan", *MODEL, "--sequence", "512", "--recompute") == plan_text(other) + "\n"


def test_plan_tells_that_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, in the words of the report; the plan itself is printed as ever."""
    for options in ([], ["--json"]):
        assert main(["plan", "--model", "llama-7b", "--device", "rtx4090", "--tokens", "8192", *options]) == 0
        told = capsys.readouterr()
        assert told.err == f"{verdict(report('llama-7b', 'rtx4090', 8192, sweep=False))[0]}\n"
        assert told.err.startswith("It does not fit: our plan takes ")
        assert told.out.startswith("{" if options else "plan: k = 0 of 34 units")
    assert main(["plan", *MODEL]) == 0
    assert capsys.readouterr().err == ""


def test_several_gpus_and_given_rates(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpus`, `--nodes`, `--skew` and the rates reach report and plan."""
    several = ["--model", small, *WHERE, "--gpus", "2", "--nodes", "3", "--skew", "1.1", "--gpu-link-gb-per-s", "300",
               "--network-gb-per-s", "25", "--host-memory-gb-per-s", "182"]
    raw = json.loads(output(capsys, "report", *several, "--json"))
    assert raw["ranks"] == {"gpus": 2, "nodes": 3, "skew": 1.1}
    rates = {"gpu_link_bytes_per_s": 300e9, "network_bytes_per_s": 25e9, "host_memory_gb_per_s": 182}
    assert {name: raw["device"][name] for name in rates} == rates
    assert all(raw["device"]["sources"][name].startswith("given: --") for name in rates)
    assert raw["profile"]["node_ranks"] == 2
    made = Plan.from_json(output(capsys, "plan", *several, "--json"))
    assert made.rows == Plan.from_json(json.dumps(raw["plan"])).rows
    assert any("one rank on 6 GPUs of 3 machines" in note for note in made.notes)


def test_moments_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """`--moments` reaches report and plan, fp32 by default; what it does not know is refused."""
    expected = report("llama-1.3b", "h200", 4096, moments="bf16", sweep=False).plan
    assert Plan.from_json(output(capsys, "plan", *MODEL, "--moments", "bf16", "--json")) == expected
    assert output(capsys, "plan", *MODEL, "--moments", "bf16") == plan_text(expected) + "\n"
    assert json.loads(output(capsys, "report", *MODEL, "--moments", "bf16", "--json"))["moments"] == "bf16"
    assert output(capsys, "plan", *MODEL, "--moments", "fp32") == output(capsys, "plan", *MODEL) != plan_text(expected) + "\n"
    with pytest.raises(SystemExit, match="2"):
        main(["report", *MODEL, "--moments", "fp16"])
    assert "invalid choice: 'fp16'" in capsys.readouterr().err


def test_the_console_command_is_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`hytrain-fx` runs `main`, and calls itself so in its errors."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hytrain-fx": "hytrain_fx.__main__:main"}
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hytrain-fx", "explain", "--plan", "missing.json"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("hytrain-fx explain: ")


def test_explain_prints_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows, reasons and figures as text, or the plan itself as JSON."""
    plan = report("llama-1.3b", "h200", 4096, sweep=False).plan
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    text = output(capsys, "explain", "--plan", str(file))
    assert text == plan_text(plan) + "\n"
    assert all(row.reason in text and row.unit_name in text for row in plan.rows)
    assert all(name in text for name in (*plan.inputs, *plan.predicted))
    assert Plan.from_json(output(capsys, "explain", "--plan", str(file), "--json")) == plan


def test_build_says_where_the_engine_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The path leads to the library that the engine loads."""
    path = build.library(SOURCES)
    assert output(capsys, "build") == f"{path}\n"
    assert json.loads(output(capsys, "build", "--json")) == {"library": str(path)}
    assert path.is_file()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` exits with 0."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert all(f"    {name} " in told for name in ("doctor", "report", "plan", "profile", "explain", "inspect", "build"))
