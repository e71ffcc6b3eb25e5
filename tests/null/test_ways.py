"""Ways to train a large model on one machine, predicted side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hytrain_fx.__main__ import main
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import section
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM
from hytrain_fx.forecast.ways import OfRank, Ways, ways_of, ways_table

PAGE = Path(__file__).parents[2] / "docs" / "large_models.md"


@pytest.fixture(scope="module")
def large() -> Ways:
    """Of a dense model of 70 G on eight GPUs."""
    return ways_of("llama-70b", "h100", 8, 16384, sequence=4096, recompute=True)


def total_bytes(ranks: tuple[OfRank, ...]) -> float:
    """Of all GPUs and the host."""
    return sum(of.device_bytes + of.host_bytes for of in ranks)


def test_every_way_holds_the_model(large: Ways) -> None:
    """Weights of 2 bytes and states of 12 rest once where both are sharded, gradients beside them.

    Resident weights are on every GPU; streamed ones are half of their masters.
    """
    resident, sharded, sharded_host, pipeline, streamed = large.ways
    params = large.params
    assert min(of.device_bytes for of in resident.ranks) > 2 * params
    assert total_bytes(resident.ranks) > (8 * 2 + 12) * params
    for way, least in ((sharded, 14), (sharded_host, 12), (pipeline, 16), (streamed, 12)):
        assert total_bytes(way.ranks) > least * params
    assert total_bytes(sharded.ranks) < total_bytes(resident.ranks) - 6 * 2 * params
    assert max(of.device_bytes for of in sharded_host.ranks) < max(of.device_bytes for of in sharded.ranks) - 2 * params / 8 / 2
    assert len(pipeline.ranks) == len(sharded.ranks) == len(sharded_host.ranks) == 8
    assert len(streamed.ranks) == 1


def test_what_does_not_fit_says_which_memory(large: Ways) -> None:
    """140 GB of weights do not fit on a GPU of 86; with four times the memory they do."""
    assert not large.ways[0].fits
    assert "device memory, 171 GB of 81.6 GB" in large.ways[0].binds
    gpu = find_device("h100")
    roomy = replace(gpu, memory_bytes=4 * gpu.memory_bytes, host_memory_bytes=4 * gpu.host_memory_bytes)
    assert all(way.fits for way in ways_of("llama-70b", roomy, 8, 16384, sequence=4096, recompute=True).ways)


def test_no_step_is_shorter_than_its_forwards_and_backwards(large: Ways) -> None:
    """A pipeline has its bubble besides, (p - 1) / m of the rest with equal stages."""
    for way in large.ways:
        case = case_of("llama-70b", "h100", 16384, sequence=4096, recompute=True)
        compute_us = case.profile.forward_us + case.profile.backward_us
        assert way.step_us >= (1 - 1e-9) * compute_us * (1 + 7 / 32 if "stages" in way.name else 1)
        assert way.tokens == way.gpus * 16384
        assert way.tokens_per_s == pytest.approx(1e6 * way.tokens / way.step_us)


def test_a_stage_of_a_small_model_keeps_its_states_on_the_gpu() -> None:
    """There is room for all, and nothing lengthens the step but the updates themselves."""
    pipeline = ways_of("llama-3.1b", "h200", 2, 8192, sequence=2048).ways[3]
    assert pipeline.fits
    assert pipeline.name == "2 stages, 8 micro-batches"
    assert sum(of.host_bytes for of in pipeline.ranks) < 14 * 3.2e9 * (1 - pipeline.resident) + 1


def test_streamed_weights_have_the_whole_host() -> None:
    """As `report` has them for one GPU in a host of so many."""
    streamed = ways_of("llama-10b", "h200", 4, 8192, sequence=2048).ways[4]
    host: DeviceSpec = find_device("h200").in_machine_of(Ranks(4))
    case = case_of(read_shape("llama-10b"), host, 8192, sequence=2048, weights="streamed")
    assert streamed.step_us == case.plan_of(OUR_SYSTEM).predicted["step_us"]


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows of dense models; those of experts need transformers. JSON has the same figures."""
    arguments = ["ways", "--model", "llama-30b", "llama-70b", "--machine", "8xh100", "4xh200", "--tokens", "16384", "--sequence", "4096",
                 "--recompute"]
    assert main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| llama")]
    assert len(rows) == 20
    page = PAGE.read_text()
    assert [row for row in rows if row not in page] == []
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [of["machine"] for of in found] == ["8 x h100", "4 x h200"] * 2
    assert len(found[0]["ways"][3]["ranks"]) == 8


def test_what_is_no_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Each error says what was found, and what is expected."""
    for machine, error in (("h100", "found --machine 'h100', expected a number of GPUs"), ("1xh100", "found one GPU, expected several"),
                           ("4xnothing", "found neither a file 'nothing' nor a device")):
        assert main(["ways", "--model", "llama-7b", "--machine", machine, "--tokens", "4096"]) == 2
        assert error in capsys.readouterr().err


def test_a_model_with_fewer_layers_than_gpus_has_the_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """Its pipeline says why there is none."""
    assert main(["ways", "--model", "llama-1.3b", "--machine", "32xh100", "--tokens", "4096"]) == 0
    text = capsys.readouterr().out
    assert "does not fit: found 32 stages, expected 1 to 26" in text
    assert text.count("| llama-1.3b | 32 x h100 |") == 5
    assert main(["ways", "--model", "llama-1.3b", "--machine", "32xh100", "--tokens", "4096", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [way["fits"] for way in found["ways"]].count(True) == 4


def test_a_table_has_a_row_for_each_way(large: Ways) -> None:
    """Bytes of ranks that are alike are told once."""
    text = section(ways_table([large]))
    assert text.count("| llama-70b | 8 x h100 |") == 5
    assert "| sharded weights | 7,344 | 17.8 s | 4% | 63 | 116 | 14 | the GPU |" in text
