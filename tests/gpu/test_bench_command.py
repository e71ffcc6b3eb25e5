"""`bench` on a GPU: every way is timed, and the verdict speaks of the GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hytrain_fx.__main__ import main
from hytrain_fx.forecast.bench.row import WAYS

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1024,
          "intermediate_size": 688, "num_attention_heads": 4, "max_position_embeddings": 256}


def test_every_way_is_timed_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its peak of device memory, and how long it took to launch.

    The link and the card are among the machine's figures.
    """
    config, file = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps(CONFIG))
    assert main(["bench", "--model", str(config), "--batch", "2", "--sequence", "128", "--steps", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {way: row.get("error") for way, row in found["rows"].items()} == dict.fromkeys(WAYS)
    assert all(row["gpu_peak_allocated_gb"] > 0 for row in found["rows"].values())
    assert all(row["launching_s"] > 0 for row in found["rows"].values())
    assert {"h2d_bytes_per_s", "d2h_bytes_per_s", "gpu_memory_bytes"} <= set(found["machine"]["figures"])
    assert found["rows"]["all_on_host"]["plan"]["k"] == 0
    assert any(line.startswith("It fits: our plan takes ") for line in found["verdict"])
    assert found["verdict"][-1].startswith("Everything fits here, and ")
    assert found["verdict"][-1] in capsys.readouterr().out
