"""`python -m hytrain_fx inspect script.py` runs the script and inspects what it compiled.

The script is not changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hytrain_fx
from hytrain_fx import api
from hytrain_fx.__main__ import main

TRAIN = """
import sys
import torch
from hytrain_fx import close, compile

def train(width, closes):
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model, optimizer = compile(model, torch.optim.AdamW(model.parameters()), k=1)
    for _ in range(2):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if closes:
        close(model)

if __name__ == "__main__":
    print("training", sys.argv[1:])
    for width in map(int, sys.argv[1:]):
        train(width, closes=width == 8)
    sys.exit(0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script whose models die with its function unless it closes them."""
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


def test_every_model_of_a_script_is_inspected(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two models, one is closed and one is not.

    Files of the second carry its number, and the script's own output goes to stderr.
    """
    argv, path, page = list(sys.argv), list(sys.path), tmp_path / "page.html"
    assert main(["inspect", str(script), "--html", str(page), "--svg", str(tmp_path / "tasks.svg"), "--", "8", "12"]) == 0
    told = capsys.readouterr()
    assert "training ['8', '12']" in told.err
    assert told.out.count("00.forward") == told.out.count("01.backward") == 2
    assert told.out.startswith(f"wrote {page}\n")
    assert "49 parameters" in page.read_text()
    assert "73 parameters" in page.with_name("page.1.html").read_text()
    assert (tmp_path / "tasks.1.svg").is_file()
    assert (sys.argv, sys.path) == (argv, path)
    assert hytrain_fx.compile is api.compile
    assert api.compile.__module__ == "hytrain_fx.api"


def test_a_layer_or_a_parameter_is_searched(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search prints nodes with their figures, or gives JSON; the page opens with the search."""
    page = tmp_path / "page.html"
    assert main(["inspect", str(script), "--layer", "2", "--html", str(page), "--", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "00.forward  wait  # 2: weight, bias; on cpu; 36 B of weights; made by insert_waits" in lines
    assert not any("# 0: " in line for line in lines)
    assert 'value="2" placeholder' in page.read_text()
    assert main(["inspect", str(script), "--parameter", "0.bias", "--json", "--", "8"]) == 0
    nodes = json.loads(capsys.readouterr().out)
    assert {node["op"] for node in nodes} >= {"wait", "grad_offload", "gpu_step"}
    assert all("0.bias" in node["parameters"] for node in nodes)


def test_a_name_that_is_no_layer_is_told(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2, after the script has run."""
    assert main(["inspect", str(script), "--layer", "7", "--", "8"]) == 2
    assert "found no managed parameter or layer '7'" in capsys.readouterr().err


def test_a_script_that_fails_fails_as_it_would_alone(tmp_path: Path) -> None:
    """Its exception and its exit status come through, and `compile` is the plain one again."""
    script, plain = tmp_path / "script.py", api.compile
    script.write_text("import hytrain_fx, sys\nsys.exit(3)")
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(script)])
    assert left.value.code == 3
    script.write_text("raise KeyError('lost')")
    with pytest.raises(KeyError, match="lost"):
        main(["inspect", str(script)])
    assert api.compile is hytrain_fx.compile is plain


def test_arguments_behind_two_dashes_are_for_scripts_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Another command refuses them."""
    with pytest.raises(SystemExit):
        main(["build", "--", "8"])
    assert "unrecognized arguments: -- 8" in capsys.readouterr().err
