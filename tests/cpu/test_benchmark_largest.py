"""The largest model and batch by trial: search, caps, estimates, table."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as command_line
from benchmarks import estimates, largest, largest_table, llama, own_modes, steps
from benchmarks.case import CannotRun, Case
from benchmarks.results import Results
from benchmarks.runner import Launch, run_case
from benchmarks.search import search
from benchmarks.table import launch_of
from benchmarks.turns import Memory, Seat
from hytrain_fx.forecast.bench.process import lacked_memory
from hytrain_fx.forecast.memory import HOST_SHARE
from hytrain_fx.forecast.named_devices import find_device

H200 = find_device("h200")
PNG = b"\x89PNG"
CAPPED = Case("ours", "h24l20", 4, device_memory_gb=24, host_memory_gb=64)

# Prints as `steps` does. It lacks memory above so many layers, or sequences, of the mode, holds as
# many MB of host memory as asked for, and counts its runs.
FAKE_STEPS = """
import json, re, sys, time
runs, edges, hold_mb = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
mode, size, _, batch, _, sequence = sys.argv[4:10]
words = sys.argv[10:]
def given(name):
    return float(words[words.index(name) + 1]) if name in words else None
alone = "--beside-others" not in words
with open(runs, "a") as file:
    file.write(f"{mode} {size} {batch}\\n" if alone else f"{mode} {size} {batch} beside others\\n")
held = bytearray(hold_mb * 10**6)
held[::4096] = b"x" * len(held[::4096])
if hold_mb:
    time.sleep(60)
grown = int(batch) if edges.get("batch") else int(re.search(r"l(\\d+)$", size)[1])
if mode not in edges:
    raise RuntimeError("no such kernel")
if grown > edges[mode]:
    raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
options = [words[at + 1] for at, word in enumerate(words) if word == "--option"]
row = {"mode": mode, "size": size, "batch": int(batch), "sequence": int(sequence), "clip": None, "autocast": mode == "torchao",
       "checkpointing": False, "options": options, "micro_batches": 1, "scaled_every": 1,
       "device_memory_gb": given("--device-memory"), "host_memory_gb": given("--host-memory"), "params": 10**8 * grown,
       "machine": {"gpu": None, "gpu_memory_gb": None, "cores": 2, "host_memory_gb": 8.0, "torch": "2", "python": "3", "boot": "1"},
       "step_s": 0.5, "spread": 0.01, "window_steps": 10, "gpu_peak_allocated_gb": 20.0, "gpu_peak_reserved_gb": 21.0, "host_rss_gb": 1.0,
       "pinned_gb": 0.5}
if mode == "ours":
    row |= {"memory_in_use": {"host_bytes": 50 * 10**9}, "plan": {"k": 1, "units": 5, "share": {"gpu": 0.25, "cpu": 0.5, "stream": 0.25}}}
if not alone:
    row["beside_others"] = True
print(json.dumps(row))
"""

Ran = Callable[[], list[str]]


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Let `largest` run FAKE_STEPS with these edges; what it gives says what ran since then."""

    def made(hold_mb: int = 0, **edges: int) -> Ran:
        script, runs = tmp_path / "fake_steps.py", tmp_path / "runs"
        script.write_text(FAKE_STEPS)
        runs.write_text("")
        command = (sys.executable, str(script), str(runs), json.dumps(edges), str(hold_mb))
        monkeypatch.setattr("benchmarks.largest.launch_of", lambda arguments: replace(launch_of(arguments), command=command))

        def ran() -> list[str]:
            text = runs.read_text()
            runs.write_text("")
            return text.splitlines()

        return ran

    return made


def largest_of(out: Path, *words: str) -> None:
    assert command_line.main(["largest", "--out", str(out), "--device", "h200", *words]) == 0


def arguments_of(command: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


# ---- the search ----


@given(st.integers(0, 3000), st.integers(0, 3000), st.floats(0.0, 0.2))
def test_the_edge_is_found_within_the_allowed_trials(edge: int, start: int, within: float) -> None:
    """From either side, in 2 + 2 log2(d + 1) trials, with no number tried twice.

    What is found trains, and what is a narrow gap larger does not.
    """
    tried: list[int] = []

    def trains(number: int) -> bool:
        tried.append(number)
        return number <= edge

    allowed = 2 + 2 * math.log2(abs(edge - max(start, 1)) + 1)
    found = search(start, trains, math.floor(allowed), within)
    assert found.found
    assert found.trials == len(tried) == len(set(tried))
    best = found.trains or 0
    assert found.fails is not None
    assert best <= edge < found.fails <= best + max(1, within * best)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 6))
def test_with_too_few_trials_nothing_wrong_is_said(edge: int, start: int, tries: int) -> None:
    """What trained did, what failed did, and `found` is said only where the gap is 1."""
    found = search(start, lambda number: number <= edge, tries)
    assert found.trials <= tries
    assert (found.trains or 0) <= edge
    assert found.fails is None or found.fails > edge
    assert found.found == (found.fails is not None and found.fails - (found.trains or 0) == 1)


# ---- caps ----


@given(st.none() | st.sampled_from([24.0, 0.5]), st.none() | st.sampled_from([64.0, 8.25]))
def test_caps_are_in_key_row_and_command_line(device_gb: float | None, host_gb: float | None) -> None:
    """A row and a command line give the caps back; a row of an earlier version has none."""
    case = replace(CAPPED, device_memory_gb=device_gb, host_memory_gb=host_gb)
    assert Case.of_row(json.loads(json.dumps(case.values()))) == case
    assert steps.case_of(arguments_of(steps, *case.arguments)) == case
    assert (case.key == CAPPED.key) == (case == CAPPED)
    earlier = {name: value for name, value in case.values().items() if not name.endswith("memory_gb")}
    assert Case.of_row(earlier) == replace(case, device_memory_gb=None, host_memory_gb=None)


def test_ours_may_put_a_share_of_the_cap_into_states() -> None:
    """It is the share that `plan` takes; what the case says itself goes before."""
    assert own_modes.options_of(CAPPED) == {"host_memory": int(HOST_SHARE * 64e9)}
    assert own_modes.options_of(replace(CAPPED, options=("host_memory=7", "moments=bf16"))) == {"host_memory": 7, "moments": "bf16"}
    assert own_modes.options_of(replace(CAPPED, host_memory_gb=None)) == {}


def test_the_device_is_capped_by_torch_s_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is the cap over all memory; a cap above that, or without a GPU, is refused."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    gpu = torch.device("cuda", 0)
    steps.cap_device(None, gpu)
    steps.cap_device(20, gpu)
    assert shares == [0.25]
    with pytest.raises(CannotRun, match=r"at most 80\.0"):
        steps.cap_device(81, gpu)
    with pytest.raises(CannotRun, match="no GPU here"):
        steps.cap_device(20, torch.device("cpu"))
    with pytest.raises(CannotRun, match="more than 0"):
        replace(CAPPED, host_memory_gb=0)


def test_a_trial_above_the_cap_is_ended(tmp_path: Path) -> None:
    """A real process that takes 600 MB is ended long before its 60 s, and the row says why."""
    script = tmp_path / "fake_steps.py"
    script.write_text(FAKE_STEPS)
    launch = Launch(tmp_path / "logs", command=(sys.executable, str(script), str(tmp_path / "runs"), json.dumps({"ours": 99}), "600"))
    row = run_case(replace(CAPPED, host_memory_gb=0.3), launch)
    assert row["error"].endswith("GB of host memory, the cap is 0.3 GB")
    assert lacked_memory(row["error"])
    assert row["wall_s"] < 30
    assert row["host_peak_gb"] > 0.3


# ---- estimates ----


def test_the_families_have_llama_7b() -> None:
    """w32 and h32l32 are Llama 7B; the cost model counts the parameters that a model has."""
    assert llama.shape_of("w32") == llama.shape_of("7b") == llama.shape_of("h32l32")
    for size in ("w2", "h2l3"):
        model = llama.build(size, 32, torch.device("meta"))
        assert estimates.shape_of(Case("ours", size, 1, 32)).params == sum(p.numel() for p in model.parameters())
    with pytest.raises(CannotRun, match="family 'x'"):
        llama.family_size("x", 3)


@given(st.integers(0, 5000))
def test_the_largest_number_that_holds(edge: int) -> None:
    """Of a condition that holds up to some number, that number."""
    assert estimates.largest_number(lambda number: number <= edge) == edge


def test_estimates_shrink_with_batch_and_caps_and_grow_with_the_host() -> None:
    """More tokens and lower caps leave room for less; states on the host, in 16 bits, for more."""
    def layers(mode: str, batch: int = 1, device_gb: float | None = 24, host_gb: float | None = 64, *options: str) -> int:
        base = Case(mode, "h24l1", batch, options=options, device_memory_gb=device_gb, host_memory_gb=host_gb)
        return largest.Axis(base, "h24").estimated(H200)

    for mode in ("all_gpu", "torchao", "zero_offload", "ours"):
        assert layers(mode) > layers(mode, 8)
        assert layers(mode, 1, None, None) > layers(mode)
    assert layers("ours") > layers("zero_offload") > layers("all_gpu")
    assert layers("ours", 1, 24, 64, "moments=bf16") > layers("ours")
    assert layers("zero_offload", 1, 24, 32) < layers("zero_offload")


@pytest.mark.parametrize("mode", ["all_gpu", "torchao", "zero_offload", "ours"])
@pytest.mark.parametrize("device_gb", [24.0, 48.0])
@pytest.mark.parametrize(("layer_share", "one_more"), [(largest.LAYER_SHARE, 1.05), (0.08, 1.1)])
def test_one_layer_more_is_a_small_part(mode: str, device_gb: float, layer_share: float, one_more: float) -> None:
    """Of the family that is searched, near the largest model that is estimated to fit."""
    base = replace(CAPPED, mode=mode, device_memory_gb=device_gb)
    axis = largest.Axis(base, largest.widest(base, H200, layer_share))
    at = axis.estimated(H200)
    assert at > 1
    small, large = (estimates.estimate_of(axis.case(number), H200) for number in (at, at + 1))
    assert small is not None
    assert large is not None
    assert estimates.shape_of(axis.case(at + 1)).params < one_more * estimates.shape_of(axis.case(at)).params


def test_the_estimate_of_ours_is_what_the_command_line_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`hytrain-fx report` on a device with the caps as its memory has the same bytes."""
    from hytrain_fx.__main__ import main

    case = replace(CAPPED, options=("moments=bf16",))
    small = replace(H200, memory_bytes=24 * 10**9, host_memory_bytes=64 * 10**9)
    device, config = tmp_path / "small.json", tmp_path / "config.json"
    device.write_text(small.to_json())
    keys = llama.shape_of(case.size)
    config.write_text(json.dumps(keys | {"model_type": "llama", "num_key_value_heads": keys["num_attention_heads"]}))
    assert main(["report", "--model", str(config), "--device", str(device), "--tokens", "8192", "--sequence", "2048", "--moments", "bf16",
                 "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    memory = next(row["memory"] for row in told["rows"] if row["system"] == "windows, states streamed too")
    found = estimates.estimate_of(case, H200)
    assert found is not None
    assert found.device_bytes == sum(memory[name] for name in ("weights_bytes", "gradients_bytes", "gpu_states_bytes", "activations_bytes"))
    assert found.host_bytes == memory["host_states_bytes"] + memory["host_slots_bytes"]
    assert estimates.estimate_of(replace(case, options=("k=3",)), H200) is None


# ---- the command ----


def test_models_are_searched_kept_and_drawn(faked: Callable[..., Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way is tried to its edge, a second call runs nothing, table and figure are written."""
    ran = faked(ours=23, all_gpu=21)
    words = ("--modes", "ours,ours:moments=bf16,all_gpu", "--batches", "4", "--family", "h24", "--start", "20", "--device-memory", "24",
             "--host-memory", "64")
    largest_of(tmp_path, *words)
    assert ran() == [f"{mode} h24l{layers} 4" for mode, order in (("ours", (20, 21, 23, 27, 25, 24)), ("ours", (20, 21, 23, 27, 25, 24)),
                                                                  ("all_gpu", (20, 21, 23, 22))) for layers in order]
    text = (tmp_path / "largest_model.md").read_text()
    assert text == capsys.readouterr().out[-len(text) - 1 : -1]
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("| A | 24, 64 |")]
    assert [line[2] for line in lines] == ["hytrain_fx", "hytrain_fx (moments=bf16)", "PyTorch, all on the GPU"]
    assert [line[3] for line in lines] == ["**2.30 G** (`h24l23`)", "**2.30 G** (`h24l23`)", "**2.10 G** (`h24l21`)"]
    assert lines[0][4].startswith("h24l24 (+")
    assert lines[0][7] == str(round(4 * 2048 / 0.5))
    estimate = estimates.estimate_of(replace(CAPPED, size="h24l23"), H200)
    assert estimate is not None
    off = estimate.device_bytes / 20e9 - 1
    assert lines[0][9] == f"{estimate.device_bytes / 1e9:.1f}: 20.0 ({off:+.1%})"
    assert lines[0][10].endswith(f": 50.0 ({estimate.host_bytes / 50e9 - 1:+.1%})")
    assert "largest miss of `hytrain-fx plan`: " in text
    assert text.count("CUDA out of memory") == 3 + 3 + 2
    assert (tmp_path / "largest_model.png").read_bytes().startswith(PNG)
    rows = Results(tmp_path / "trials.json")
    assert len(rows.cases()) == 16
    assert all((rows.get(case) or {})["estimate"]["device_bytes"] > 0 for case in rows.cases())
    largest_of(tmp_path, *words)
    assert ran() == []


def test_batches_are_searched(faked: Callable[..., Ran], tmp_path: Path) -> None:
    """From the estimate on, each number of sequences once, to a gap of 3 %."""
    faked(ours=7, all_gpu=100, batch=1)
    largest_of(tmp_path, "--search", "batch", "--sizes", "h8l4", "--modes", "ours,all_gpu", "--start", "8", "--tries", "15")
    text = (tmp_path / "largest_batch.md").read_text()
    assert "| A | all, all | h8l4 x 2048 | hytrain_fx | **7** | 8 (+14.3%) |" in text
    assert "| **99** | 101 (+2.0%) | " in text
    assert (tmp_path / "largest_batch.png").read_bytes().startswith(PNG)


def test_searches_side_by_side_find_the_same(faked: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seats of one GPU: each search is one seat's, and a trial waits for its caps' memory.

    Trials run beside each other; what was found runs once more, alone.
    """
    ran = faked(ours=22, all_gpu=19)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(largest, "memory_here", lambda: Memory(60.0, 200.0))
    words = ("--modes", "ours,ours:moments=bf16,all_gpu", "--batches", "4", "--family", "h24", "--start", "20", "--device-memory", "24",
             "--host-memory", "64")
    largest_of(tmp_path / "beside", *words, "--gpus", "1", "--rows-per-gpu", "2")
    beside = ran()
    assert sorted(run for run in beside if not run.endswith(" beside others")) == ["all_gpu h24l19 4", "ours h24l22 4", "ours h24l22 4"]
    largest_of(tmp_path / "alone", *words)
    assert sorted(run.removesuffix(" beside others") for run in beside if run.endswith(" beside others")) == sorted(ran())
    found = [[line for line in (tmp_path / out / "largest_model.md").read_text().splitlines() if line.startswith("| A | 24, 64 |")]
             for out in ("beside", "alone")]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_a_speed_that_was_not_timed_alone_is_marked(faked: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stays where the run alone fails; the next call tries again."""
    ran = faked(ours=20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(largest, "memory_here", lambda: Memory(60.0, 200.0))
    words = ("--modes", "ours", "--batches", "4", "--family", "h24", "--start", "20", "--device-memory", "24", "--host-memory", "64",
             "--gpus", "1")
    with monkeypatch.context() as patch:
        run = largest.Trials._run
        patch.setattr(largest.Trials, "_run", lambda trials, case, seat, *, alone: {"error": "ended"} if alone else
                      run(trials, case, seat, alone=False))
        largest_of(tmp_path, *words)
    assert "(beside others)" in (tmp_path / "largest_model.md").read_text()
    ran()
    largest_of(tmp_path, *words)
    assert ran() == ["ours h24l20 4"]
    assert "(beside others)" not in (tmp_path / "largest_model.md").read_text()


def test_a_trial_waits_for_the_memory_of_its_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its GPU and of the host; what others hold is free once they have ended."""
    monkeypatch.setattr(largest, "memory_here", lambda: Memory(60.0, 200.0))
    trials = largest.Trials(Results(tmp_path / "trials.json"), Launch(tmp_path), H200, again=False, retry=False)
    seat = Seat("0", (0,), shared=True)
    third = threading.Event()

    def begin_third() -> None:
        with trials._room(CAPPED, seat):
            third.set()

    with ExitStack() as rooms:
        rooms.enter_context(trials._room(CAPPED, seat))
        with trials._room(CAPPED, seat):
            waits = threading.Thread(target=begin_third)
            waits.start()
            assert not third.wait(1.5)
        assert third.wait(20)
        waits.join()


@pytest.mark.parametrize("caps", [(), ("--device-memory", "24"), ("--host-memory", "64")])
def test_side_by_side_needs_both_caps(
    caps: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial that may use up all has no room beside others; the error says what to give."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert command_line.main(["largest", "--out", str(tmp_path), "--gpus", "1", *caps]) != 0
    assert "found --gpus without caps" in capsys.readouterr().err


def test_a_failure_of_another_kind_is_no_edge(faked: Callable[..., Ran], tmp_path: Path) -> None:
    """A row that breaks for another reason than memory is told, and the next way is searched.

    It runs again with --retry only.
    """
    ran = faked(ours=20)
    words = ("--modes", "torchao,ours", "--batches", "1", "--family", "h24", "--start", "20")
    largest_of(tmp_path, *words)
    text = (tmp_path / "largest_model.md").read_text()
    assert "h24l20, batch 1: RuntimeError: no such kernel" in text
    assert "**2.00 G** (`h24l20`)" in text
    assert ran()[0] == "torchao h24l20 1"
    largest_of(tmp_path, *words)
    assert ran() == []
    largest_of(tmp_path, *words, "--retry")
    assert ran() == ["torchao h24l20 1"]


def test_a_call_without_time_says_so_and_the_next_goes_on(faked: Callable[..., Ran], tmp_path: Path) -> None:
    """With no time nothing runs and the table says what is open."""
    ran = faked(ours=20)
    words = ("--modes", "ours", "--batches", "1", "--family", "h24", "--start", "20")
    largest_of(tmp_path, *words, "--total-s", "0")
    assert ran() == []
    assert "call again for the rest" in (tmp_path / "largest_model.md").read_text()
    largest_of(tmp_path, *words, "--tries", "1")
    assert "or more | - |" in (tmp_path / "largest_model.md").read_text()
    largest_of(tmp_path, *words)
    assert "Not at an end" not in (tmp_path / "largest_model.md").read_text()
    assert ran() == ["ours h24l20 1", "ours h24l21 1"]


def test_a_trial_is_not_begun_that_would_not_end(faked: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trial of the mode took longer than what is left, the next call has it."""
    ran = faked(ours=20)
    words = ("--modes", "ours", "--batches", "1", "--family", "h24", "--start", "20", "--total-s", "100")
    results = Results(tmp_path / "trials.json")
    largest_of(tmp_path, *words[:-2], "--tries", "1")
    case, row = next(results_of(tmp_path))
    results.put(case, row | {"wall_s": 95.0})
    seconds = iter([0.0, 20.0])
    monkeypatch.setattr("benchmarks.largest.time.monotonic", lambda: next(seconds, 20.0))
    ran()
    largest_of(tmp_path, *words)
    assert ran() == []


def results_of(out: Path) -> Iterator[tuple[Case, dict[str, Any]]]:
    return Results(out / "trials.json").all_measured()


@pytest.mark.parametrize(("error", "lacked"), [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
    ("hytrain_fx.errors.HostMemoryError: no plan fits the memory: ...", True),
    ("hytrain_fx.errors.ConfigError: option host_memory=3 and gpu_states='auto': no plan fits; ...", True),
    ("killed (by the system: it does so when host memory is used up)", True),
    ("out of memory: its processes held 65 GB of host memory, the cap is 64 GB", True),
    ("hytrain_fx.errors.EngineError: pinning 30.00 GiB of host memory failed (CUDA error 2); ...", True),
    ("mode torchao needs torchao, which cannot be imported here", False),
    ("took longer than 540 s", False), ("ended by signal 11: ...", False),
])
def test_what_counts_as_lack_of_memory(error: str, lacked: bool) -> None:
    """Only that moves the search to something smaller."""
    assert largest.decides({"error": error}) == lacked


@pytest.mark.sample(0)
def test_a_real_trial_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model is trained under a cap, its row has what its processes held, and it is drawn."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling is not what this shows
    largest_of(tmp_path, "--search", "batch", "--sizes", "tiny", "--modes", "floor", "--start", "1", "--tries", "1", "--seq", "16",
               "--window", "1", "--warmup", "0", "--host-memory", "12")
    (_, row), = results_of(tmp_path)
    assert 0.05 < row["host_peak_gb"] < 12
    assert "| A | all, 12 | tiny x 16 |" in (tmp_path / "largest_batch.md").read_text()


def memories(rows: Sequence[tuple[Case, dict[str, Any]]]) -> list[str]:
    return [f"{tier} {memory.miss:+.2f}" for _, row in rows for tier, memory in largest_table.memory_of(row).items()]


def test_a_miss_is_of_what_was_measured() -> None:
    """Ours is compared by its states on the host, others by all that they hold.

    A tier that is not used is left out.
    """
    row: dict[str, Any] = {"gpu_peak_allocated_gb": 20.0, "host_peak_gb": 40.0, "estimate": {"device_bytes": 21e9, "host_bytes": 30e9}}
    ours = row | {"memory_in_use": {"host_bytes": 25 * 10**9}}
    assert memories([(CAPPED, row), (CAPPED, ours)]) == ["device +0.05", "host -0.25", "device +0.05", "host +0.20"]
    assert memories([(CAPPED, row | {"estimate": None}), (CAPPED, row | {"error": "no"})]) == []
    assert memories([(CAPPED, row | {"estimate": {"device_bytes": 21e9, "host_bytes": 0}})]) == ["device +0.05"]
