"""The logs of `hytrain_fx.integrations.logging`: what each tool is given, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError
from hytrain_fx.integrations.logging import MetricsLog, PrometheusFile, TensorBoardLog, WandbLog
from hytrain_fx.session.step_metrics import METRICS

from .loops import plain_loop
from .models import mlp

SAMPLE = re.compile(r'(hytrain_fx_\w+)(\{.*\})? (\S+)')


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A compiled model after two steps."""
    torch._dynamo.reset()
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    plain_loop(2)(model, optimizer, batches)
    yield model
    hytrain_fx.close(model)


class Told:
    """A run of wandb and a SummaryWriter in one: notes what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.scalars: dict[str, tuple[float, int | None]] = {}

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.rows.append((data, step))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> None:
        self.scalars[tag] = (scalar_value, global_step)


def named(model: Any) -> dict[str, float]:
    """The metrics by the names that they are logged under."""
    return {f"hytrain_fx/{name}": value for name, value in hytrain_fx.metrics(model).items()}


def test_wandb_gets_one_row_a_call(model: Any) -> None:
    """A step that is given is handed on; without one wandb numbers the row itself."""
    run = Told()
    log = WandbLog(model, run)
    log()
    log(7)
    assert run.rows == [(named(model), None), (named(model), 7)]


def test_tensorboard_gets_a_scalar_of_each(model: Any) -> None:
    """Under the count of steps, or the number that is given."""
    writer = Told()
    TensorBoardLog(model, writer)()
    assert writer.scalars == {name: (value, 2) for name, value in named(model).items()}
    TensorBoardLog(model, writer)(9)
    assert {step for _, step in writer.scalars.values()} == {9}


def test_a_real_summary_writer_takes_them(model: Any, tmp_path: Path) -> None:
    """The events on disk have every metric."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found,unused-ignore]
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoardLog(model, writer)()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(named(model))
    assert events.Scalars("hytrain_fx/steps_done")[0].value == 2.0


def test_prometheus_gets_a_whole_file(model: Any, tmp_path: Path) -> None:
    """Every metric has its help, type and value, labels are escaped, and no other file is left."""
    file = tmp_path / "train.prom"
    file.write_text("of an earlier run")
    PrometheusFile(model, file, labels={"run": 'a "b"\\c', "host": "h"})()
    text = file.read_text()
    assert list(tmp_path.iterdir()) == [file]
    assert text.endswith("\n")
    for name, value in hytrain_fx.metrics(model).items():
        assert f"# HELP hytrain_fx_{name} {METRICS[name].meaning}\n# TYPE hytrain_fx_{name} {METRICS[name].kind}\nhytrain_fx_{name}" in text
        assert f'hytrain_fx_{name}{{run="a \\"b\\"\\\\c",host="h"}} {float(value)!r}\n' in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    assert len(samples) == len(hytrain_fx.metrics(model))


def test_a_reader_never_sees_half_a_file(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays until the new text is whole, and no part of that is collected."""
    file = tmp_path / "train.prom"
    log = PrometheusFile(model, file)
    log()
    before = file.read_text()
    seen: list[str] = []

    def write(path: Path, text: str, encoding: str) -> int:
        seen.extend([path.name, file.read_text()])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="disk full"):
        log()
    assert seen[1] == before == file.read_text()
    assert not seen[0].endswith(".prom")


def test_a_label_of_prometheus_may_be_a_number(model: Any, tmp_path: Path) -> None:
    """It is written as its text."""
    file = tmp_path / "train.prom"
    PrometheusFile(model, file, labels={"rank": 0})()
    assert '{rank="0"}' in file.read_text()


def test_one_call_of_three_logs(model: Any) -> None:
    """The first one does."""
    run = Told()
    log = WandbLog(model, run, every=3)
    for step in range(7):
        log(step)
    assert [step for _, step in run.rows] == [0, 3, 6]


@pytest.mark.parametrize(("make", "found"), [
    (lambda model: WandbLog(model, None, every=0), "every=0"),
    (lambda model: PrometheusFile(model, "train.txt"), r"train\.txt"),
    (lambda model: PrometheusFile(model, "train.prom", labels={"1st": "a"}), "1st"),
    (lambda model: PrometheusFile(model, "no such folder/train.prom"), "no such folder/train.prom"),
])
def test_what_a_tool_would_refuse_is_refused_at_once(make: Any, found: str) -> None:
    """The error names what was found."""
    with pytest.raises(ConfigError, match=found):
        make(None)


def test_the_page_has_every_metric() -> None:
    """Each key has its line in docs/metrics.md, and no other has."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "(" not in line.split("|")[1]]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(METRICS)


def test_every_log_is_a_metrics_log() -> None:
    """One of your own needs `write` only."""
    assert all(issubclass(log, MetricsLog) for log in (WandbLog, TensorBoardLog, PrometheusFile))
