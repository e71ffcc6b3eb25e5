"""The benchmarks on a tiny model and on hand-made rows: results, comparisons, failures."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import __main__ as command_line
from benchmarks import beside, cases, figures, largest, llama, steps, sweep, table
from benchmarks.case import MODES, CannotRun, Case
from benchmarks.cases import Claim
from benchmarks.overlap import overlap, share_during
from benchmarks.results import Results, all_gpu_of, floor_of, peer_of
from benchmarks.runner import Launch, measure, run_case
from docs import draw_figures
from hytrain_fx.explain.timeline.span import Interval, length, union
from hytrain_fx.explain.timeline.timeline import read_trace
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.bench.windows import MOST_CALMING_STEPS, timed, warm_up
from hytrain_fx.runtime.energy import meter_of

MACHINE = {"gpu": None, "gpu_memory_gb": None, "cores": 2, "host_memory_gb": 8.0, "torch": "2", "python": "3", "boot": "1"}
TINY = [Case(mode, "tiny", 2, 32) for mode in ("floor", "all_gpu", "ours")]
PNG = b"\x89PNG"

# Prints as `steps` does, but takes the step time from the batch; counts its runs; all_gpu fails,
# zero_offload never ends.
FAKE_STEPS = """
import json, sys, time
mode, size, _, batch, _, sequence = sys.argv[2:8]
with open(sys.argv[1], "a") as file:
    file.write(mode + "\\n")
if mode == "all_gpu":
    print("a word of warning", file=sys.stderr)
    raise MemoryError("no room for 12 bytes")
if mode == "zero_offload":
    time.sleep(600)
print("a package says hello")
row = {"mode": mode, "size": size, "batch": int(batch), "sequence": int(sequence), "clip": None, "autocast": False, "checkpointing": False,
       "options": [], "micro_batches": 1, "scaled_every": 1,
       "machine": MACHINE, "step_s": int(batch) / 8, "spread": 0.0, "window_steps": 10,
       "gpu_peak_allocated_gb": None, "gpu_peak_reserved_gb": None, "host_rss_gb": 1.0, "pinned_gb": None}
print(json.dumps(row))
print("and goodbye")
"""


def row_of(case: Case, step_s: float, **more: Any) -> dict[str, Any]:
    """A row as `steps` prints it."""
    about: dict[str, Any] = {}
    if case.mode == "ours":
        about = {"predicted_step_s": 1.1 * step_s,
                 "plan": {"k": 1, "units": 5, "share": {"gpu": 0.2, "cpu": 0.7, "stream": 0.1}}}
    memory = dict.fromkeys(("gpu_peak_allocated_gb", "gpu_peak_reserved_gb", "pinned_gb"))
    return {**case.values(), "machine": MACHINE, "params": 10**9, "step_s": step_s, "spread": 0.01, "window_steps": 10,
            "host_rss_gb": 1.0, **memory, **about, **more}


def results_of(folder: Path, rows: Sequence[tuple[Case, dict[str, Any]]]) -> Results:
    """Results with these rows, read from their file."""
    written = Results(folder / "results.json")
    for case, row in rows:
        written.put(case, row)
    return Results(folder / "results.json")


def fake_launch(folder: Path, **options: Any) -> tuple[Launch, Path]:
    """A launch of FAKE_STEPS, and the file in which it notes each run."""
    script, runs = folder / "fake_steps.py", folder / "runs"
    script.write_text(FAKE_STEPS.replace("MACHINE", repr(MACHINE)))
    return Launch(folder / "logs", command=(sys.executable, str(script), str(runs)), **options), runs


def arguments_of(command: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


# ---- a row ----


def test_a_row_of_ours_has_all_that_a_table_shows(tmp_path: Path) -> None:
    """Case, machine, three windows, memory, plan and prediction are in it, and it survives JSON."""
    words = ("ours", "tiny", "--batch", "2", "--seq", "16", "--window", "2", "--warmup", "8", "--clip", "1.0", "--option", "workers=1",
             "--micro-batches", "2", "--scaled-every", "3")
    row = json.loads(json.dumps(steps.run(arguments_of(steps, *words))))
    case = Case.of_row(row)
    assert case == Case("ours", "tiny", 2, 16, clip=1.0, options=("workers=1",), micro_batches=2, scaled_every=3)
    assert len(row["windows_s"]) == 3
    assert sorted(row["windows_s"])[1] == row["step_s"]
    assert row["window_steps"] == 2
    assert (row["gpu_joules_per_step"] is None) == ("gpu" in row["energy_absent"])
    assert sum(row["plan"]["share"].values()) == pytest.approx(1.0, abs=1e-3)
    assert row["predicted_step_s"] == pytest.approx(row["plan"]["predicted"]["step_us"] / 1e6, abs=1e-4)
    assert row["params"] == sum(p.numel() for p in llama.build("tiny", 16, torch.device("meta")).parameters())
    assert set(row_of(case, 1.0)) <= set(row)  # so that what other tests draw is what is measured
    assert row["engine"]["workers"] == 1
    assert 0 < row["startup"]["own_us"] < row["startup"]["total_us"]
    text = table.markdown(results_of(tmp_path, [(case, row)]), [])
    assert case.label in text
    assert "too short" in text
    assert f"| {row['startup']['total_us'] / 1e6:.2f} |" in text


@pytest.mark.sample(0)
def test_a_run_with_a_barrier_and_a_plain_one_are_drawn_on_one_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the barrier no update runs during a backward or forward; both traces make one picture.

    Recording has a cost.

    The row is printed before all that, so that a time limit cannot take it.
    """
    words = ("ours", "tiny", "--batch", "2", "--seq", "16", "--window", "1", "--warmup", "8", "--option", "k=0", "--option", "stream=0")
    paths = [tmp_path / name for name in ("barrier.json", "ours.json", "both.png", "ours.png")]
    rows = [steps.run(arguments_of(steps, *words, "--barrier", "--timeline", str(paths[0]))),
            steps.run(arguments_of(steps, *words, "--recording", "--timeline", str(paths[1]), "--timeline", str(paths[3])))]
    assert [row.get("barrier") for row in rows] == [True, None]
    printed = capsys.readouterr().out
    early = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [row["windows_s"] for row in early] == [row["windows_s"] for row in rows]
    assert rows[0]["timeline"]["overlap_share"] == 0.0
    assert all(row["timeline"]["longest_launch_us"] > 0 for row in rows)
    assert len(rows[1]["recording"]["on_s"]) == len(rows[1]["recording"]["off_s"]) == 3
    assert [[timeline.source for timeline in read_trace(path)] for path in paths[:2]] == [["measured"], ["measured", "predicted"]]
    assert printed.count("optimizer.step() returned") == 2
    draw_figures.main(["--record", *map(str, paths[:2]), "--heading", "tiny", "--data", str(tmp_path / "both.json")])
    drawn = draw_figures.steps_of(json.loads((tmp_path / "both.json").read_text()))
    assert [bool(step.lanes["GPU"] and step.lanes["CPU, 1 threads"]) for step in drawn] == [True, True]
    draw_figures.draw_lanes(paths[2], "tiny", drawn, draw_figures.LOOKS["light"])
    assert all(path.read_bytes().startswith(PNG) for path in paths[2:])


@pytest.mark.sample(0)
def test_rows_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line runs a row in another process; a peer that cannot run says what it needs."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling is not what this shows
    results = Results(tmp_path / "results.json")
    floor, peer = TINY[0], Case("torchao", "tiny", 2, 32)
    launch = Launch(tmp_path / "logs", extra=("--window", "1", "--warmup", "0"))
    measure([peer, floor], results, launch, tell=lambda _: None)
    measured = results.measured(floor)
    assert measured is not None
    assert measured["wall_s"] > 0
    failed = results.get(peer)
    assert failed is not None
    assert failed["error"].startswith("mode torchao needs")


def test_the_model_is_that_of_transformers() -> None:
    """The model has transformers' modules, shapes and buffers, in the dtype asked for.

    It is built without memory first.
    """
    ours = llama.build("tiny", 32, torch.device("cpu"))
    theirs = LlamaForCausalLM(LlamaConfig(**llama.shape_of("tiny"), max_position_embeddings=32, tie_word_embeddings=False))
    assert {name: p.shape for name, p in ours.named_parameters()} == {name: p.shape for name, p in theirs.named_parameters()}
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    buffers = dict(theirs.named_buffers())
    assert buffers
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, buffers.pop(name), rtol=0, atol=0)
    assert not buffers


def test_causal_attention_gets_no_mask_where_the_whole_model_is_traced() -> None:
    """The weights and the loss are those of the same size without `-causal`."""
    losses, calls = dict[str, torch.Tensor](), dict[str, list[tuple[bool, bool]]]()
    for size in ("tiny", f"tiny{llama.CAUSAL}"):
        of_size = calls.setdefault(size, [])

        def look(graph: torch.fx.GraphModule, _: Any, of_size: list[tuple[bool, bool]] = of_size) -> torch.fx.GraphModule:
            attentions = graph.graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention)
            of_size.extend((node.kwargs["attn_mask"] is None, node.kwargs["is_causal"]) for node in attentions)
            return graph

        model = llama.build(size, 32, torch.device("cpu"), torch.float32)
        torch.compiler.reset()
        losses[size] = torch.compile(model, backend=look)(**next(llama.batches(size, 2, 32, torch.device("cpu")))).loss.detach()
    assert calls["tiny-causal"] == [(True, True)] * 2
    assert len(calls["tiny"]) == 2
    torch.testing.assert_close(*losses.values())


def test_the_weights_are_the_same_in_every_row() -> None:
    """Two builds have equal bits, and the tokens are the same too."""
    first, second = (llama.build("tiny", 32, torch.device("cpu")) for _ in range(2))
    assert steps.checksum(first) == steps.checksum(second)
    assert torch.equal(*(next(llama.batches("tiny", 2, 8, torch.device("cpu")))["input_ids"] for _ in range(2)))


def test_what_cannot_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed on stdout, the reason on stderr, and the status is 1."""
    for words, message in ((["steps", "ours", "huge"], "huge"), (["steps", "torchao", "tiny", "--clip", "1"], "clip"),
                           (["steps", "torchao", "tiny", "--micro-batches", "2"], "micro-batches"),
                           (["steps", "ours", "tiny", "--scaled-every", "2"], "--scaled-every"),
                           (["steps", "floor", "tiny", "--barrier"], "--barrier"),
                           (["steps", "ours", "tiny", "--timeline", "steps.svg"], "steps.svg"),
                           (["steps", "floor", "tiny", "--option", "k=0"], "--option"), (["table", "no-such"], "no-such"),
                           (["sweep", "tiny", "--tokens", "3", "--seq", "2"], "3 tokens")):
        assert command_line.main(words) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert message in told.err


@pytest.mark.parametrize("name", [name for name, *_ in command_line.COMMANDS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A per cent sign is a format to argparse, which raises only when the text is shown."""
    with pytest.raises(SystemExit) as left:
        command_line.main([name, "--help"])
    assert left.value.code == 0
    assert f"benchmarks {name}" in capsys.readouterr().out


def test_contention_measures_updates_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Without copies it needs no GPU; with them and no GPU it says so."""
    assert command_line.main(["contention", "--threads", "1,2", "--seconds", "0.1", "--params", "100000", "--skip-copies"]) == 0
    rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2"]
    assert all(float(row.split("|")[4]) > 0 for row in rows)
    if not torch.cuda.is_available():
        assert command_line.main(["contention"]) == 1
        assert "--skip-copies" in capsys.readouterr().err


def test_beside_times_launching_beside_every_kind_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Work is done while it is wanted: each kind repeats, and nobody is left."""
    before = set(multiprocessing.active_children())
    arguments = ["--counts", "1", "--parameters", "65536", "--size", "h1l1", "--steps", "3", "--backend", "eager"]
    assert command_line.main(["beside", *arguments]) == 0
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == ["nothing", *beside.KINDS, "nothing"]
    assert all((float(row[-1]) > 0) == (row[0] != "nothing") for row in rows), rows
    assert all(float(row[2]) > 0 for row in rows)
    assert set(multiprocessing.active_children()) == before


# ---- cases ----

case_values = st.builds(
    Case, st.just("ours"), st.sampled_from(["tiny", "3b"]), st.integers(1, 9), st.integers(1, 9), st.none() | st.sampled_from([0.5, 1.0]),
    st.booleans(), st.booleans(), st.lists(st.sampled_from(["k=0", "k=1"]), max_size=2).map(tuple))


@given(case_values, case_values)
def test_a_case_is_its_key_its_row_and_its_command_line(case: Case, other: Case) -> None:
    """Cases with one key are equal; a row and a command line give their case back."""
    assert (case.key == other.key) == (case == other)
    assert Case.of_row(json.loads(json.dumps(case.values()))) == case
    assert steps.case_of(arguments_of(steps, *case.arguments)) == case


def test_rows_are_compared_with_the_same_training() -> None:
    """The floor never clips, torchao has neither clips nor 16-bit parameters.

    ZeRO-Offload clips where the row does.
    """
    row = Case("ours", "3b", 8, clip=1.0, options=("k=0",))
    assert floor_of(row) == Case("floor", "3b", 8)
    assert all_gpu_of(row) == Case("all_gpu", "3b", 8)
    assert peer_of(row, "zero_offload") == Case("zero_offload", "3b", 8, clip=1.0)
    assert peer_of(replace(row, autocast=True), "zero_offload") == Case("zero_offload", "3b", 8, clip=1.0)
    assert peer_of(row, "torchao") == Case("torchao", "3b", 8, autocast=True)


def test_every_claim_has_its_rows() -> None:
    """Some case runs the rows that a claim compares.

    Every mode but the reference is in some case.
    """
    everything = cases.rows_of(cases.named(["all"]))
    claims = [claim for case_set in cases.CASE_SETS.values() for claim in case_set.claims]
    assert {row for claim in claims for row in (claim.row, claim.against)} <= set(everything)
    assert {row.mode for row in everything} == set(MODES) - {"reference"}
    assert len(everything) == len(set(everything))
    assert not [row for row in cases.rows_of(cases.named(["all"]), peers=False) if row.mode in ("zero_offload", "torchao")]


def test_a_claim_is_met_on_its_side() -> None:
    """`faster` wants a large figure, `of` a small one."""
    faster, of = (Claim("", TINY[2], TINY[0], 2.0, faster=faster) for faster in (True, False))
    assert [faster.met(faster.value(over), 2.0) for over in (0.4, 0.6)] == [True, False]
    assert [of.met(of.value(over), 2.0) for over in (1.9, 2.1)] == [True, False]


# ---- running ----


def test_a_table_survives_failures_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A failed row has its reason, and the next row runs.

    A second call runs nothing, `retry` runs what failed, `again` runs all.
    """
    launch, runs = fake_launch(tmp_path)
    told: list[str] = []
    measure(TINY, Results(tmp_path / "results.json"), launch, tell=told.append)
    results = Results(tmp_path / "results.json")
    assert runs.read_text().split() == ["floor", "all_gpu", "ours"]
    assert results.measured(TINY[1]) is None
    assert results.cases() == TINY
    assert "MemoryError: no room for 12 bytes" in table.markdown(results, [])
    assert "MemoryError" in told[1]
    for again, retry, expected in ((False, False, []), (False, True, ["all_gpu"]), (True, False, ["floor", "all_gpu", "ours"])):
        runs.write_text("")
        measure(TINY, Results(tmp_path / "results.json"), launch, tell=told.append, again=again, retry=retry)
        assert runs.read_text().split() == expected


def test_a_row_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A row that takes too long has a result that says so, and its process has ended.

    When the time of all rows is over, the others are left out.
    """
    launch, _ = fake_launch(tmp_path, limit_s=1.0)
    endless = Case("zero_offload", "tiny")
    assert run_case(endless, launch)["error"] == "took longer than 1 s"
    results, told = Results(tmp_path / "results.json"), list[str]()
    measure([TINY[0], endless, TINY[2]], results, replace(launch, limit_s=600.0, total_s=3.0), tell=told.append)
    assert results.cases() == TINY[:1]
    assert "call again" in told[-1]


def test_what_is_no_result_file_is_left_alone(tmp_path: Path) -> None:
    """A file that is no result file is an error, and does not change."""
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(CannotRun, match="not a result file"):
        Results(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_text() == "[1]"


# ---- tables and plots ----


def test_a_table_compares_only_rows_of_one_machine(tmp_path: Path) -> None:
    """Rows of the same boot have ratios; elsewhere there is a dash."""
    other_boot = {"machine": {**MACHINE, "boot": "2"}}
    floor, all_gpu, ours = TINY
    results = results_of(tmp_path, [(floor, row_of(floor, 2.0)), (all_gpu, row_of(all_gpu, 4.0, **other_boot)), (ours, row_of(ours, 3.0))])
    assert results.step_over(ours, floor) == 1.5
    assert results.step_over(ours, all_gpu) is None
    line = next(line for line in table.markdown(results, []).splitlines() if "`ours`" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:7] == ["A", "`ours`", "3.0000", "1.0%", "1.500", "-", "-"]
    assert cells[8] == "3.3000 (+10.0%)"
    claim = cases.CaseSet("tiny", tuple(TINY), (Claim("of the floor", ours, floor, 1.4, 1.6), Claim("-", ours, all_gpu, 1.0)))
    assert "| tiny | of the floor | **1.500** | at most 1.4 (missed) | 1.6 (met) |" in table.markdown(results, [claim])


def test_table_sweep_and_figures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With rows that exist nothing is run, and every plot and text is written."""
    points = [Case(mode, "tiny", batch, 32) for mode in ("floor", "ours", "all_gpu") for batch in (1, 2)]
    results_of(tmp_path, [(case, row_of(case, case.batch / 4, idle_share=0.25)) for case in points])
    words = ["--out", str(tmp_path)]
    assert command_line.main(["table", *words]) == 0
    assert command_line.main(["sweep", "tiny", "--tokens", "32,64", "--seq", "32", *words]) == 0
    assert command_line.main(["figures", "--batches", "1,4", "--device", "h200", *words]) == 0
    for name in ("table", "sweep", "throughput", "largest", "idle"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    assert "| 64 | 0.5000 | 0.5000 | 1.0% | 1.000 | 0.5500 | +10.0% | 1/5 | 10% | 128 |" in (tmp_path / "sweep.md").read_text()
    text = (tmp_path / "figures.md").read_text()
    assert "| tiny, 2 x 32 | 128 | 128 |" in text
    assert "| tiny, 2 x 32 | 25.0 | 25.0 |" in text
    assert not (tmp_path / "logs").exists()
    capsys.readouterr()


# ---- traces ----

interval_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1]))))


@given(interval_lists, interval_lists)
def test_unions_and_shares_count_moments(inner: list[Interval], outer: list[Interval]) -> None:
    """The length of a union and the share inside another equal a count of unit moments."""
    moments = [{at for begin, end in intervals for at in range(int(begin), int(end))} for intervals in (inner, outer)]
    assert length(union(inner)) == len(moments[0])
    expected = len(moments[0] & moments[1]) / len(moments[0]) if moments[0] else 0.0
    assert math.isclose(share_during(union(inner), union(outer)), expected)


def test_overlap_counts_the_compute_stream_only() -> None:
    """Updates and copies are compared with the kernels of the compute stream only."""
    def event(category: str, name: str, stream: int, begin: float, end: float) -> dict[str, Any]:
        return {"cat": category, "name": name, "tid": stream, "ts": begin, "dur": end - begin}

    found = overlap([
        event("kernel", "mm", 7, 0, 60), event("kernel", "mm", 7, 80, 100), event("kernel", "adamw", 8, 60, 70),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 9, 50, 70), event("cpu_update", "update row 1", 0, 60, 100),
    ])
    assert found["compute_busy_s"] == pytest.approx(80e-6)
    assert found["d2h_during_kernels"] == pytest.approx(0.5)
    assert found["cpu_update_during_kernels"] == pytest.approx(0.5)
    assert found["h2d_s"] == 0.0


def test_commands_have_the_arguments_that_run_rows() -> None:
    """What `table`, `sweep`, `figures` and `largest` pass on is understood by `steps`."""
    for command, words in ((table, ["smoke"]), (sweep, ["tiny"]), (figures, []), (largest, [])):
        launch = table.launch_of(arguments_of(command, *words, "--idle", "--warmup", "5"))
        parsed = arguments_of(steps, *TINY[2].arguments, *launch.extra)
        assert parsed.idle
        assert parsed.warmup == 5


@pytest.mark.parametrize(("with_plans", "warmup", "ran"), [
    ((), 20, 20), ((3,), 20, 20), ((16, 25), 20, 35), (range(1000), 20, 20 + MOST_CALMING_STEPS), ((), 0, 0),
])
def test_steps_are_timed_once_no_more_plans_are_made(with_plans: Sequence[int], warmup: int, ran: int) -> None:
    """The warm-up goes on until ten steps have passed without a new plan.

    It ends sooner where too many steps were waited for. Without plans it is as long as asked for.
    """
    done: list[int] = []

    def step(tokens: torch.Tensor) -> torch.Tensor:
        done.append(len(done) + 1)
        return tokens

    trainer = Trainer(step, lambda: None, plans=lambda: len(set(done) & set(with_plans)))
    assert warm_up(trainer, itertools.repeat(torch.zeros(1)), warmup) == ran == len(done)


def test_windows_tell_how_long_planning_held_their_steps_up() -> None:
    """That of each window over its steps, without what came before in the warm-up."""
    held_up_s = 0.0

    def step(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal held_up_s
        held_up_s += 1.0 if held_up_s < 5 else 0.0
        return tokens

    trainer = Trainer(step, lambda: None, held_up_s=lambda: held_up_s)
    cpu = torch.device("cpu")
    found = timed(trainer, itertools.repeat(torch.zeros(1)), 2, 2, cpu, meter_of(cpu), step_tokens=1)
    assert found["held_up_s"] == [1.0, 0.5, 0.0]


def test_launching_is_the_host_s_time_in_the_newest_forward_and_backward() -> None:
    """Not that of a whole step; where there has been no step there is none."""
    layer = torch.nn.Linear(2, 2)

    def backward(batch: float) -> torch.Tensor:
        time.sleep(batch)
        return torch.zeros(())

    for trainer in (loops.floor(layer, backward), loops.on_device(layer, backward, foreach=True)):
        assert trainer.launching_s() is None
        found = []
        for slept_s in (0.05, 0.01):
            begin_s = time.perf_counter()
            trainer.step(slept_s)
            taken_s = time.perf_counter() - begin_s
            launching_s = trainer.launching_s()
            assert launching_s is not None
            assert slept_s <= launching_s <= taken_s
            found.append(launching_s)
        assert found[0] != found[1]


def test_steps_are_timed_once_no_way_is_tried() -> None:
    """Nor does the warm-up end while ways of updating are timed, until ten steps later."""
    done: list[int] = []

    def step(tokens: torch.Tensor) -> torch.Tensor:
        done.append(1)
        return tokens

    trainer = Trainer(step, lambda: None, tries=lambda: 5 < len(done) < 40)
    assert warm_up(trainer, itertools.repeat(torch.zeros(1)), 20) == 49 == len(done)
