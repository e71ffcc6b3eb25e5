"""Named machines and the profiles made from their rates."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast import device_file
from hytrain_fx.forecast.data_sheets import DATA_SHEETS, DataSheet
from hytrain_fx.forecast.device import SOURCE_KINDS, DeviceSpec, analytic_profile
from hytrain_fx.forecast.named_devices import find_device, known_devices
from hytrain_fx.forecast.shapes import read_shape

SHAPE = read_shape("llama-1.3b")
H200 = find_device("h200")


@pytest.mark.parametrize("name", sorted(known_devices()))
def test_known_devices_say_where_their_figures_come_from(name: str) -> None:
    """Each device is found by its name in any case, and survives JSON.

    Each of its figures is measured, from a data sheet, or estimated.
    """
    spec = find_device(name.upper())
    assert spec.name == name
    assert DeviceSpec.from_json(spec.to_json()) == spec
    assert set(spec.sources) == set(spec.figures())
    assert all(source.split(":")[0] in SOURCE_KINDS[:3] for source in spec.sources.values())


@pytest.mark.parametrize("sheet", DATA_SHEETS, ids=lambda sheet: sheet.name)
def test_what_is_not_read_in_a_data_sheet_is_said_to_be_estimated(sheet: DataSheet) -> None:
    """Only the device's memory and its link to other GPUs are a data sheet's own figures.

    Their sources name the document.

    Rates that a run reaches are shares of a peak, and hosts are assumed: both are estimated.
    """
    sources = find_device(sheet.name).sources
    of_the_sheet = {name for name, source in sources.items() if source.startswith(f"data sheet: {sheet.document}")}
    assert of_the_sheet == {"memory_bytes", "memory_bytes_per_s"} | ({"gpu_link_bytes_per_s"} if sheet.gpus_link else set())
    assert all(source.startswith("estimated: ") for name, source in sources.items() if name not in of_the_sheet)
    assert sheet.document in sources["achieved_flops"]


def test_a_device_in_toml(tmp_path: Path) -> None:
    """The example in the documentation is a device; its figures are given ones.

    A wrong key, a missing one and a line that is no TOML are told with the file's name.
    """
    example = textwrap.dedent((device_file.__doc__ or "").split("has:\n")[1].split("\nIt may")[0])
    path = tmp_path / "mine.toml"
    path.write_text(example)
    mine = find_device(path)
    assert (mine.name, mine.achieved_flops, mine.memory_bytes, mine.host_memory_gb_per_s) == ("my workstation", 90e12, 24 * 10**9, None)
    assert set(mine.sources.values()) == {"given: no source was named"}
    path.write_text(f'{example}host_memory_gb_per_s = 60\n[sources]\nmemory_bytes = "data sheet: RTX"')
    assert (find_device(path).host_memory_gb_per_s, find_device(path).sources["memory_bytes"]) == (60, "data sheet: RTX")
    for text, told in ((example.replace("memory_bytes =", "memory_byte ="), r"'memory_byte' is not known \(do you mean memory_bytes\?\)"),
                       ('name = "x"', "there is no achieved_flops, memory_bytes"), ("name = x", "not a device in TOML")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"mine.toml.*{told}"):
            find_device(path)


@pytest.mark.parametrize(("model", "step_s", "forward_s"), [("llama-3.1b", 0.309, 0.101), ("llama-7b", 0.628, None)])
def test_h200_figures_meet_the_measured_steps(model: str, step_s: float, forward_s: float | None) -> None:
    """The H200's forward and backward of 4 x 2048 tokens are within 4% of measured ones."""
    p = analytic_profile(read_shape(model), H200, 8192, sequence=2048)
    assert (p.forward_us + p.backward_us) / 1e6 == pytest.approx(step_s, rel=0.04)
    assert forward_s is None or p.forward_us / 1e6 == pytest.approx(forward_s, rel=0.04)


def test_updates_and_copies_follow_the_rates() -> None:
    """Update and copy times are parameters and 16-bit bytes over the device's rates."""
    p = analytic_profile(SHAPE, H200, 4096)
    assert p.cpu_update_us == pytest.approx(1e6 * SHAPE.params / 5.9e9)
    assert p.alpha == pytest.approx(5.9 / 122.6)
    assert p.d2h_us == pytest.approx(1e6 * 2 * SHAPE.params / 47.9e9)
    assert [u.params for u in p.units] == [u.params for u in SHAPE.units]
    assert (p.steps, p.tokens, p.device) == (0, 4096, "h200")


@given(tokens=st.integers(256, 1 << 16), more=st.integers(1, 1 << 16))
def test_more_tokens_take_longer(tokens: int, more: int) -> None:
    """Forward and backward grow with tokens, updates and copies do not."""
    short, long = (analytic_profile(SHAPE, H200, n, sequence=256) for n in (tokens, tokens + more))
    assert long.forward_us > short.forward_us
    assert long.backward_us > short.backward_us
    assert (long.cpu_update_us, long.d2h_us) == (short.cpu_update_us, short.d2h_us)


def test_recomputation_adds_one_forward_of_each_layer() -> None:
    """With recomputation the backward is longer by the layers' forward alone.

    The head's and the embedding's forward do not count.
    """
    plain, again = (analytic_profile(SHAPE, H200, 8192, recompute) for recompute in (False, True))
    layers = sum(u.forward_us for u in plain.units[1:-1])
    assert again.backward_us - plain.backward_us == pytest.approx(layers)
    assert again.units[-1].backward_us == plain.units[-1].backward_us


def test_longer_sequences_cost_attention() -> None:
    """At equal tokens longer sequences make layers slower, twice as much without a causal mask."""
    def layer_us(sequence: int, causal: bool) -> float:
        return analytic_profile(replace(SHAPE, causal=causal), H200, 8192, sequence=sequence).units[1].forward_us

    causal, full = (layer_us(4096, c) - layer_us(1024, c) for c in (True, False))
    assert full == pytest.approx(2 * causal)
    assert causal > 0


def test_a_device_from_a_file(tmp_path: Path) -> None:
    """A JSON file describes a device of the user's own."""
    path = tmp_path / "mine.json"
    path.write_text(replace(H200, name="mine").to_json())
    assert find_device(path).name == "mine"
    raw = json.loads(path.read_text())
    del raw["sources"], raw["host_memory_gb_per_s"], raw["about"]
    path.write_text(json.dumps(raw))
    mine = find_device(path)
    assert mine.host_memory_gb_per_s is None
    assert {source.split(":")[0] for source in mine.sources.values()} == {"given"}


def test_a_device_in_another_host() -> None:
    """The host's rates and their sources come from the other machine, all else stays."""
    laptop = find_device("cpu-laptop")
    mixed = H200.on_host_of(laptop)
    host = {"cpu_update_params_per_s", "host_memory_bytes", "host_memory_gb_per_s"}
    for name, value in mixed.figures().items():
        assert value == (laptop if name in host else H200).figures()[name]
        assert mixed.sources[name] == (laptop if name in host else H200).sources[name]


def test_what_is_no_device_is_refused(tmp_path: Path) -> None:
    """An unknown name, a file that describes no device, and a rate of 0 are errors."""
    with pytest.raises(ConfigError, match="nor a device of that name; the names are h200"):
        find_device("tpu")
    path = tmp_path / "bad.json"
    for text in ('{"name": "x"}', "[]", "{", '{"name": "x", "sources": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json.*expected .*name, achieved_flops"):
            find_device(path)
    with pytest.raises(ConfigError, match="as the source of memory_bytes"):
        replace(H200, sources={**H200.sources, "memory_bytes": "heard of"})
    with pytest.raises(ConfigError, match="d2h_bytes_per_s=0"):
        replace(H200, d2h_bytes_per_s=0)
    with pytest.raises(ConfigError, match="found 0 tokens"):
        analytic_profile(SHAPE, H200, 0)
