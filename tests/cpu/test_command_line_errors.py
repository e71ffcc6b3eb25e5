"""Wrong arguments: one line on stderr, exit status 2, nothing on stdout, no traceback."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hytrain_fx.__main__ import main
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.ir.plan import Placement, Plan, PlanRow

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128,
         "num_attention_heads": 4}
H200 = json.loads(find_device("h200").to_json())
PLAN = json.loads(Plan((PlanRow(0, "layer", 0, 8, Placement.CPU, "no room"),), 0, "windowed", predicted={"step_us": 1.0}).to_json())
TEXTS: dict[str, bytes | str] = {
    "binary": b"\xff\xfe\x00{", "broken": "{", "list": "[1, 2]", "number": "3", "null": "null", "deep": "[" * 100_000, "empty": "{}",
    "script.py": "print('nothing is compiled')", "llama": json.dumps({**LLAMA, "max_position_embeddings": 2048}),
}


def with_(whole: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**whole, **changes})


def without(whole: dict[str, Any], key: str) -> str:
    return json.dumps({name: value for name, value in whole.items() if name != key})


CONFIGS = {
    "no model_type": json.dumps({"vocab_size": 100}), "no layers": without(LLAMA, "num_hidden_layers"),
    "no heads": with_(LLAMA, num_attention_heads=0), "text for a number": with_(LLAMA, vocab_size="100"),
    "null for a number": with_(LLAMA, hidden_size=None), "a number without end": with_(LLAMA, hidden_size=10**400),
    "part of a layer": with_(LLAMA, num_hidden_layers=1.5),
    "a context of nothing": with_(LLAMA, max_position_embeddings=0), "other family": json.dumps({"model_type": "no-such", "d_model": 8}),
    "number as family": json.dumps({"model_type": 3}),
}
DEVICES = {
    "text for a number": with_(H200, memory_bytes="x"), "no figure": without(H200, "memory_bytes"), "unknown figure": with_(H200, speed=1),
    "sources that are none": with_(H200, sources=3), "about that is none": with_(H200, about=3), "number as name": with_(H200, name=3),
}
PLANS = {
    "rows that are none": with_(PLAN, rows=3), "text for a figure": with_(PLAN, predicted={"step_us": "x"}),
    "null for a figure": with_(PLAN, inputs={"k": None}),
    "number as note": with_(PLAN, notes=[3]), "number as source": with_(PLAN, source=3),
    "number as reason": with_(PLAN, rows=[{**PLAN["rows"][0], "reason": 3}]),
    "null as unit": with_(PLAN, rows=[{**PLAN["rows"][0], "unit_name": None}]),
    "text as rank": with_(PLAN, rows=[{**PLAN["rows"][0], "rank": "x"}]),
}
BENCH = ["bench", "--model", "{tmp}/llama"]
REPORT = ["report", "--model", "llama-1.3b", "--device", "h200", "--tokens", "4096"]


def report(**changes: str) -> list[str]:
    """The arguments of a report that works, with others instead or besides."""
    pairs = {**dict(zip(REPORT[1::2], REPORT[2::2], strict=True)), **{f"--{name.replace('_', '-')}": of for name, of in changes.items()}}
    return ["report", *(word for pair in pairs.items() for word in pair)]


def explain(plan: str) -> list[str]:
    return ["explain", "--plan", plan]


FILES = ("binary", "broken", "list", "number", "null", "deep", "empty", "folder", "missing", "")
CASES: dict[str, tuple[list[str], str]] = {
    **{f"model {name!r}": (report(model=f"{{tmp}}/{name}" if name else ""), f"{name}|no model_type") for name in FILES},
    **{f"device {name!r}": (report(device=f"{{tmp}}/{name}" if name else ""), "a device|not a text") for name in FILES},
    **{f"host {name!r}": (report(host=f"{{tmp}}/{name}"), "a device|not a text") for name in ("binary", "missing")},
    **{f"plan {name!r}": (explain(f"{{tmp}}/{name}"), "") for name in FILES},
    "plan of a config": (explain("{tmp}/llama"), "found no 'rows'"),
    **{f"config: {name}": (report(model=f"{{tmp}}/config/{name}"), "config|model_type") for name in CONFIGS},
    **{f"device: {name}": (report(device=f"{{tmp}}/device/{name}"), "device") for name in DEVICES},
    **{f"plan: {name}": (explain(f"{{tmp}}/plan/{name}"), "not a saved plan") for name in PLANS},
    **{f"tokens {of}": (report(tokens=of), "tokens") for of in ("0", "-1", "1" + "0" * 400)},
    **{f"sequence {of}": (report(sequence=of), "sequences") for of in ("0", "-1")},
    "share of a part of a sequence": (["share", "--model", "llama-1.3b", "--tokens", "100", "--sequence", "1000"],
                                      "sequences of 1000 tokens in a batch of 100,"),
    **{f"budget {of}": (report(budget_gb=of), "budget") for of in ("-1", "nan", "inf", "1e300")},
    **{f"out {name!r}": ([*REPORT, "--out", f"{{tmp}}/{name}"], "cannot be written") for name in ("folder", "missing/x", "a\0b")},
    **{f"{of} GPUs": (report(gpus=of), f"gpus={of} and nodes=1, expected 1 to") for of in ("0", "-2", "1" + "0" * 400)},
    "no machines": (["plan", *REPORT[1:], "--nodes", "0"], "gpus=1 and nodes=0, expected 1 to"),
    **{f"skew {of}": (report(gpus="2", skew=of), "expected a finite factor >= 1") for of in ("0.5", "nan", "inf")},
    "skew of one rank": (report(skew="1.5"), "with one rank, expected several"),
    "autocast on ranks": ([*report(gpus="2"), "--autocast"], "autocast on 2 GPUs"),
    **{f"{rate} of {of}": (report(gpus="2", **{rate: of}), f"--{rate.replace('_', '-')} {of}, expected more than 0")
       for rate in ("gpu_link_gb_per_s", "network_gb_per_s", "host_memory_gb_per_s") for of in ("0", "nan")},
    **{f"{link} link of one alone": (report(**{f"{link}_gb_per_s": "5"}), f"-gb-per-s 5 with one .*: set {option}")
       for link, option in (("gpu_link", "--gpus"), ("network", "--nodes"))},
    "network of one machine": (["plan", *report(gpus="2", network_gb_per_s="5")[1:]], "with one machine, expected several: set --nodes"),
    "unknown model": (report(model="llama-8t"), "llama-8t.*llama-70b"),
    "unknown device": (report(device="h300"), "h300.*h200"),
    "unknown factory": (report(model="json:nope"), "json:nope cannot be had"),
    "factory that is a value": (report(model="json:__doc__"), "expected a function"),
    **{f"profile of {of} s": (["profile", "--seconds", of], "expected more than 0 s") for of in ("0", "-1", "nan", "inf")},
    "profile of no memory": (["profile", "--megabytes", "0"], "expected more than 0 s"),
    "profile of much memory": (["profile", "--megabytes", "1" + "0" * 30], "smaller --megabytes"),
    "profile by nobody": (["profile", "--workers", "0"], "1 to 4096 workers"),
    "profile by too many": (["profile", "--workers", "100000"], "1 to 4096 workers"),
    "profile into nowhere": (["profile", "--out", "{tmp}/missing/x"], "cannot be written"),
    "bench of nothing": (["bench", "--model", "{tmp}/missing"], "missing.*llama-70b"),
    "bench of an unknown family": (["bench", "--model", "{tmp}/config/other family"], "no-such"),
    "bench of a model alone": (["bench", "--model", "torch.nn:Identity"], "expected a pair"),
    "bench of a function and a batch": (["bench", "--model", "torch.nn:Identity", "--batch", "2"], "expected none"),
    "bench of uneven tokens": ([*BENCH, "--tokens", "100", "--sequence", "64"], "--tokens 100 as 1 sequences of 64"),
    "bench of no sequences": ([*BENCH, "--batch", "0"], "expected at least 1"),
    "bench above the context": ([*BENCH, "--sequence", "4096"], "at most 2048"),
    "bench of no steps": ([*BENCH, "--steps", "0"], "at least one step"),
    "bench of no time": ([*BENCH, "--limit-s", "nan"], "more than 0 s"),
    "bench into nowhere": ([*BENCH, "--json", "{tmp}/missing/x"], "cannot be written"),
    "missing script": (["inspect", "{tmp}/missing.py"], "neither a script nor a folder .*missing.py"),
    "folder without texts": (["inspect", "{tmp}/folder"], "no graph texts"),
    "script without a model": (["inspect", "{tmp}/script.py"], "compiled no model"),
    "page into nowhere": (["inspect", "{tmp}/script.py", "--html", "{tmp}/missing/x.html"], "cannot be written"),
    "JSON into nowhere": (["inspect", "{tmp}/script.py", "--json", "{tmp}/folder"], "cannot be written"),
    "page and picture in one file": (["inspect", "{tmp}/script.py", "--html", "{tmp}/x", "--svg", "{tmp}/x"], "a file of its own"),
    "a layer and a parameter": (["inspect", "{tmp}/script.py", "--layer", "0", "--parameter", "0.bias"], "--layer 0 and --parameter"),
    "page of a dump": (["inspect", "{tmp}/folder", "--html", "{tmp}/x.html"], "expected a script"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with everything but what is expected."""
    tmp = tmp_path_factory.mktemp("files")
    for folder in ("folder", "config", "device", "plan"):
        (tmp / folder).mkdir()
    for name, text in TEXTS.items():
        (tmp / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for folder, texts in (("config", CONFIGS), ("device", DEVICES), ("plan", PLANS)):
        for name, text in texts.items():
            (tmp / folder / name).write_text(text)
    return tmp


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_told_in_one_line(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the command and what was found."""
    arguments, message = CASES[name]
    assert main([argument.replace("{tmp}", str(files)) for argument in arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    line = [line for line in told.err.splitlines() if line != "nothing is compiled"]
    assert len(line) == 1, told.err
    assert line[0].startswith(f"python -m hytrain_fx {arguments[0]}: ")
    assert re.search(message, line[0].partition(": ")[2])


def test_a_wrong_path_is_told_before_the_script_runs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may take hours."""
    assert main(["inspect", str(files / "script.py"), "--svg", str(files / "missing/x.svg")]) == 2
    assert "nothing is compiled" not in capsys.readouterr().err


@pytest.mark.parametrize("raised", ["OSError('the disk of the script')", "__import__('hytrain_fx').errors.ConfigError('of the script')"])
def test_an_error_of_the_script_keeps_its_traceback(raised: str, tmp_path: Path) -> None:
    """Also one of a kind that a wrong argument has."""
    script = tmp_path / "script.py"
    script.write_text(f"import hytrain_fx.errors\nraise {raised}")
    with pytest.raises((OSError, ValueError), match="of the script") as failed:
        main(["inspect", str(script)])
    assert failed.traceback[-1].path == script


def test_the_compiler_s_lines_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`build` with a compiler that fails tells what it said, with status 2."""
    (tmp_path / "g++").write_text("#!/bin/sh\n[ -n \"${1##*version*}\" ] || exit 0\necho first >&2\necho second >&2\nexit 1\n")
    os.chmod(tmp_path / "g++", 0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path / "cache"))
    assert main(["build"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "first\nsecond\n" in told.err
