"""`bench` times ways of training in processes of their own, and says what came out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from torch import nn

from hytrain_fx.__main__ import main
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.bench import command
from hytrain_fx.forecast.bench.comparison import NO_GPU, Comparison
from hytrain_fx.forecast.bench.row import WAYS, measured
from hytrain_fx.forecast.bench.workload import Asked, workload
from hytrain_fx.forecast.doctor import Finding

from .test_transformers_models import FAMILIES, config_of

CPU = torch.device("cpu")
MACHINE = (Finding("CPU", "16 logical CPUs", "", figures={"cpus": 16}),
           Finding("host memory", "200 GB available", "", figures={"host_available_bytes": 200e9}),
           Finding("GPU", "a card", "", figures={"gpu_memory_bytes": 80e9}))
PLAN = {"k": 3, "units": 28, "share": {"gpu": 0.1, "cpu": 0.6, "stream": 0.3}}


def config_file(folder: Path, family: str = "llama") -> str:
    """A small model's config."""
    file = folder / f"{family}.json"
    file.write_text(json.dumps(config_of(family)))
    return str(file)


def row_of(way: str, step_s: float, gpu_gb: float | None) -> dict[str, Any]:
    """A row as a process prints it."""
    ours = {"plan": PLAN, "memory_in_use": {"host_bytes": 40e9}, "binds_line": "predicted: the CPU binds", "change_line": "change it"}
    row = {"way": way, "step_s": step_s, "spread": 0.01, "gpu_peak_allocated_gb": gpu_gb}
    return {**row, **(ours if way in ("all_on_host", "solved") else {})}


def compared(**steps_s: float | str) -> Comparison:
    """A comparison on a machine with a GPU, by way; a text is why there is no time."""
    gpu_gb = {"floor": 20.0, "all_on_device": 50.0, "all_on_host": 22.0, "solved": 45.0}
    rows = {way: {"way": way, "error": of} if isinstance(of, str) else row_of(way, of, gpu_gb[way]) for way, of in steps_s.items()}
    return Comparison(MACHINE, "a model", 3_000_000_000, 8192, "tokens", "4 x 2048 tokens", 10, rows)


# ---- what is trained ----


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "whisper", "vit", "mamba"])
def test_a_model_of_any_kind_has_a_batch_to_train_on(family: str, tmp_path: Path) -> None:
    """Weights are drawn, ids are random, and every parameter that has a part in it gets a gradient.

    Text is counted in tokens, images and recordings in samples.
    """
    of = workload(Asked(config_file(tmp_path, family), batch=2, sequence=None if FAMILIES[family][1] == "samples" else 8), CPU)
    assert (of.name, of.counted, of.count) == (family, FAMILIES[family][1], 2 if of.counted == "samples" else 16)
    assert {parameter.dtype for parameter in of.model.parameters()} == {torch.bfloat16}
    ids = of.batch[1].get("input_ids")
    assert ids is None or ids.unique().numel() > 2
    assert torch.isfinite(of.backward(of.batch))
    grads = [parameter.grad for parameter in of.model.parameters() if parameter.requires_grad]
    assert sum(grad is not None and bool(grad.any()) for grad in grads) > len(grads) // 2


def test_a_name_is_a_family_with_its_default_sizes() -> None:
    """Nothing is downloaded, and on the meta device nothing is allocated."""
    of = workload(Asked("gpt2", tokens=2048), torch.device("meta"))
    assert of.params == 124_439_808
    assert of.size == "2 x 1024 tokens"
    assert workload(Asked("llama-1.3b"), torch.device("meta")).size == "4 x 2048 tokens"


def test_a_function_gives_the_model_and_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is the model's own, or the mean square of what it returns."""
    (tmp_path / "factory_of_bench.py").write_text(textwrap.dedent("""
        import torch

        def model():
            return torch.nn.Linear(4, 2), torch.ones(8, 4)
    """))
    monkeypatch.chdir(tmp_path)
    of = workload(Asked("factory_of_bench:model"), CPU)
    assert (of.name, of.size, of.counted, of.params) == ("model", "8 samples", "samples", 10)
    assert of.backward(of.batch) == pytest.approx(float(of.model(torch.ones(8, 4)).detach().square().mean()))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_a_row(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what the table and the verdict show, and survives JSON."""
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)  # of the plain ways: compiling is not what this shows
    row = json.loads(json.dumps(measured(Asked(config_file(tmp_path), batch=2, sequence=8), way, 1)))
    shown = row_of(way, 1.0, None)
    assert set(shown) <= set(row)
    assert row["way"] == way
    assert len(row["windows_s"]) == 3
    if "plan" in shown:
        assert set(PLAN) <= set(row["plan"])
        assert set(PLAN["share"]) == set(row["plan"]["share"])  # type: ignore[call-overload]
    assert way != "all_on_host" or row["plan"]["k"] == 0


def test_samples_are_not_asked_for_in_tokens(tmp_path: Path) -> None:
    """How many there are is said by the batch."""
    with pytest.raises(ConfigError, match="expected --batch"):
        workload(Asked(config_file(tmp_path, "vit"), tokens=64), torch.device("meta"))


# ---- what is said ----


def test_the_verdict_where_everything_fits() -> None:
    """It compares with the plain loop, and says what the memory costs."""
    lines = compared(floor=0.30, all_on_device=0.34, all_on_host=0.51, solved=0.34).verdict()
    assert lines == [
        "It fits: our plan takes 45 GB of 80 GB on the GPU and 40 GB of 200 GB on the host.",
        "With everything on the GPU it fits too, in 50 GB: 340 ms a step, 24.1 k tokens a second.",
        "Our plan: 340 ms a step, 24.1 k tokens a second, 1.13 times forward and backward alone. The states of 3 of 28 units rest on the "
        "GPU, 33% of the others' visit it. Measured.",
        "Predicted: the CPU binds.", "Change it.",
        "Everything fits here, and a plain compiled loop is as fast. With all states on the host 28 GB more are free, at 1.50 times a "
        "plain step: room for a larger batch.",
    ]


@pytest.mark.parametrize(("solved", "words"), [
    (0.34, "as fast."), (0.345, "as fast."), (0.51, "faster: our plan takes 1.50 times its step."),
    (0.17, "slower: our plan takes 0.50 times its step."),
])
def test_the_verdict_says_which_is_faster(solved: float, words: str) -> None:
    """Within 2% they are equally fast."""
    line = compared(floor=0.1, all_on_device=0.34, all_on_host=0.51, solved=solved).verdict()[-1]
    assert line.startswith(f"Everything fits here, and a plain compiled loop is {words}")


def test_the_verdict_where_a_plain_loop_does_not_fit() -> None:
    """Then there is nothing to compare with."""
    found = compared(floor=0.30, all_on_device="out of memory: 3 GB", all_on_host=0.51, solved=0.36)
    lines = found.verdict()
    assert lines[1] == "With everything on the GPU it does not fit: out of memory: 3 GB"
    assert lines[-1] == "Use it: the model does not train here otherwise, and a step is 1.20 times forward and backward alone."
    assert "plain, all on device: out of memory: 3 GB" in found.text()


def test_the_verdict_where_nothing_fits() -> None:
    """What could not run is told with its reason."""
    assert compared(floor="out of memory: 3 GB").verdict() == ["Forward and backward alone: it does not fit: out of memory: 3 GB"]
    killed = "killed (by the system: ...)"
    lines = compared(floor=0.3, all_on_device=killed, all_on_host="too large", solved="out of memory: 9 GB").verdict()
    assert lines == ["With our plan it does not fit: out of memory: 9 GB", f"With everything on the GPU it does not fit: {killed}"]


def test_a_row_that_fails_otherwise_is_not_said_not_to_fit() -> None:
    """And nothing is recommended for want of a plain loop's time."""
    lines = compared(floor=0.30, all_on_device="took longer than 9 s", all_on_host=0.51, solved=0.36).verdict()
    assert lines[1] == "With everything on the GPU it did not run: took longer than 9 s"
    assert lines[-1] == "Change it."


def test_without_a_gpu_the_times_are_said_to_be_no_sign() -> None:
    """Nothing is recommended, and memory of a GPU is not spoken of."""
    rows = {way: row_of(way, 1.0, None) for way in WAYS}
    found = replace(compared(floor=1.0), machine=MACHINE[:2], rows=rows)
    assert found.verdict()[0] == NO_GPU
    assert not [line for line in found.verdict()[1:] if "GPU" in line or "Use it" in line]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    """Heads and figures are whole; sentences may be longer."""
    table = Console(file=io.StringIO(), width=80)
    found = compared(floor=0.123, all_on_device=0.123, all_on_host=0.567, solved=0.345)
    table.print(found._table())
    printed = table.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    assert all(way.title in printed for way in WAYS.values())
    assert len(printed.splitlines()) == 3 + len(WAYS)


def test_windows_that_differ_are_told() -> None:
    """Then no figure is worth much."""
    found = compared(floor=0.30, all_on_device=0.34, all_on_host=0.51, solved=0.34)
    assert not [line for line in found.verdict() if "rough" in line]
    rows = {**found.rows, "floor": {**found.rows["floor"], "spread": 0.4}}
    assert "windows of one row differ by 40%" in replace(found, rows=rows).verdict()[0]


# ---- the command ----

STARTED = """
import json, sys

if sys.argv[1] == "doctor":
    print(json.dumps({"findings": FINDINGS}))
    sys.exit(0)
way = sys.argv[sys.argv.index("--row") + 1]
if way == "all_on_device":
    print("a package says hello")
    print("cannot run: out of memory: 3 GB")
    print("and goodbye", file=sys.stderr)
    sys.exit(2)
print(json.dumps(ROW | {"way": way, "asked": sys.argv[2:]}))
"""


def started(tmp_path: Path, state: str = "ok") -> tuple[str, ...]:
    """What the command starts instead of itself: prints as it does, at once."""
    script = tmp_path / "started.py"
    found = {"what": "GPU", "found": "a card", "meaning": "", "state": state, "figures": {**MACHINE[1].figures, **MACHINE[2].figures}}
    script.write_text(STARTED.replace("FINDINGS", repr([found])).replace("ROW", repr(row_of("solved", 0.5, 40.0))))
    return sys.executable, str(script)


def test_the_command_shows_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails too; the file has all figures, and rows are asked for what was asked for."""
    monkeypatch.setattr(command, "_ITSELF", started(tmp_path))
    file = tmp_path / "found.json"
    assert main(["bench", "--model", config_file(tmp_path), "--tokens", "64", "--sequence", "16", "--steps", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "llama: " in printed
    assert "4 x 16 tokens a step, median of three windows of 2 steps" in printed
    assert all(way.title in printed for way in WAYS.values())
    assert "plain, all on device: out of memory: 3 GB" in printed
    assert found["verdict"][-1].startswith("Use it")
    assert found["verdict"][-1] in printed
    assert set(found["rows"]) == set(WAYS)
    assert found["machine"]["figures"]["gpu_memory_bytes"] == 80e9
    assert found["rows"]["floor"]["asked"][1:] == ["--model", config_file(tmp_path), "--tokens", "64", "--sequence", "16", "--steps", "2",
                                                   "--row", "floor"][1:]


def test_a_machine_that_cannot_train_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what `doctor` found, with status 2."""
    monkeypatch.setattr(command, "_ITSELF", started(tmp_path, state="bad"))
    assert main(["bench", "--model", config_file(tmp_path)]) == 2
    assert "would not work here: GPU: a card; hytrain-fx doctor" in capsys.readouterr().err


def test_a_command_that_is_ended_ends_its_row(tmp_path: Path) -> None:
    """The row has a session of its own, and would keep its GPU."""
    ours, row = started(tmp_path), tmp_path / "row"
    script = Path(ours[1])
    script.write_text(script.read_text().replace("way = ", f"open({str(row)!r}, 'w').write(str(__import__('os').getpid()))\n"
                                                 "__import__('time').sleep(600)\nway = "))
    code = (f"from hytrain_fx.forecast.bench import command\nfrom hytrain_fx.__main__ import main\ncommand._ITSELF = {ours!r}\n"
            f"main(['bench', '--model', {config_file(tmp_path)!r}])")
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as running:
        while not row.exists() or not row.read_text():
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        assert running.wait() == 143
    assert not psutil.pid_exists(int(row.read_text()))


def test_a_row_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and status 2; without room for its states on the CPU it does not begin."""
    monkeypatch.setattr("hytrain_fx.forecast.bench.row.available_host_bytes", lambda: 1000)
    assert main(["bench", "--model", config_file(tmp_path), "--batch", "1", "--sequence", "8", "--row", "all_on_device"]) == 2
    assert capsys.readouterr().out.startswith("cannot run: out of memory: its states take ")
