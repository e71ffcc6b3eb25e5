"""What `largest` found, as Markdown and as a figure: sizes, tokens a second, memory.

Memory is given as estimated before the trial, then as measured: the peak that torch allocated on
the device, and what is on the host. That is the optimizer states and their slots for ours, and all
that the processes hold for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case
from benchmarks.estimates import shape_of
from benchmarks.markdown import letter, machines, table
from benchmarks.plots import Panel, draw_bar_panels
from benchmarks.results import Results, Row, is_short

TIERS = ("device", "host")
OF_MEMORY = ("device GB, before: measured", "host GB, before: measured")
HEAD = ("run", "GB of device, of host", "beside", "way", "largest", "does not fit", "estimated", "trials", "tokens/s", "spread", *OF_MEMORY,
        "host GB in all", "states on the GPU, before: ran", "streamed, before: ran")


@dataclass(frozen=True)
class Found:
    """One search.

    base        the row whose model (`of_models`) or batch grows
    best        the largest that trained; None: none did
    failed      the least that lacked memory; None: none did
    estimated   what was estimated to be the largest; None: nothing was to fit
    why_open    why the search is not at its end; empty where it is
    """

    base: Case
    of_models: bool
    best: Case | None
    failed: Case | None
    estimated: Case | None
    trials: int
    why_open: str = ""

    @property
    def caps(self) -> str:
        """The device's and the host's cap, in GB."""
        return ", ".join("all" if gb is None else f"{gb:g}" for gb in (self.base.device_memory_gb, self.base.host_memory_gb))

    @property
    def beside(self) -> str:
        """What does not grow."""
        words = f"batch {self.base.batch}" if self.of_models else self.base.size
        return f"{words} x {self.base.sequence}" + (", activations recomputed" if self.base.checkpointing else "")

    def number(self, case: Case | None) -> str:
        """What grows, of one case."""
        return "-" if case is None else case.size if self.of_models else str(case.batch)


@dataclass(frozen=True)
class Memory:
    """Bytes of one tier, estimated before the trial and measured."""

    before: float
    measured: float

    @property
    def miss(self) -> float:
        """By what share of the measured bytes the estimate is too large."""
        return self.before / self.measured - 1


def write(found: Sequence[Found], results: Results, out: Path, name: str) -> str:
    """Write `name`.md and `name`.png; the text."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(found, results)
    (out / f"{name}.md").write_text(text)
    draw(found, results, out / f"{name}.png")
    return text


def markdown(found: Sequence[Found], results: Results) -> str:
    """The largest of each search, what is open, the largest misses, and every trial."""
    title = "# The largest model that trains" if all(of.of_models for of in found) else "# The largest batch that trains"
    still = [f"- {of.base.title}, {of.caps} GB, {of.beside}: {of.why_open}" for of in found if of.why_open]
    parts = [title, machines(results), table(HEAD, [_line(of, results) for of in found]), "\n".join(misses(results))]
    parts += ["\n".join(["## Not at an end", "", *still])] if still else []
    return "\n\n".join(part for part in [*parts, _trials(results)] if part) + "\n"


def memory_of(row: Row) -> dict[str, Memory]:
    """By tier, where both figures are there and the tier is used."""
    estimate, in_use = row.get("estimate"), row.get("memory_in_use")
    if estimate is None or "error" in row:
        return {}
    of_others = 1e9 * (row.get("host_peak_gb") or row.get("host_peak_rss_gb") or 0.0)
    measured = {"device": 1e9 * (row["gpu_peak_allocated_gb"] or 0.0), "host": of_others if in_use is None else in_use["host_bytes"]}
    before = {tier: estimate[f"{tier}_bytes"] for tier in TIERS}
    return {tier: Memory(before[tier], measured[tier]) for tier in TIERS if before[tier] and measured[tier]}


def misses(results: Results) -> list[str]:
    """A line each: how far the plan's memory was off at most, and the other ways' estimates."""
    lines = []
    for words, ours in (("`hytrain-fx plan`", True), ("the other ways' estimates", False)):
        off = [(abs(memory.miss), f"{memory.miss:+.1%} of the {tier}, `{case.key}`") for case, row in results.all_measured()
               if (case.mode == "ours") == ours for tier, memory in memory_of(row).items()]
        lines += [f"- Memory before the trial, largest miss of {words}: {max(off)[1]}"] if off else []
    return lines


def draw(found: Sequence[Found], results: Results, path: Path) -> None:
    """Two plots: the largest by caps and way, and its tokens a second."""
    sizes: dict[str, dict[str, float]] = {}
    speeds: dict[str, dict[str, float]] = {}
    for of in found:
        if of.best is None or (row := results.measured(of.best)) is None:
            continue
        group = f"GB: {of.caps}\n{of.beside}"
        sizes.setdefault(group, {})[of.base.title] = row["params"] / 1e9 if of.of_models else of.best.batch
        speeds.setdefault(group, {})[of.base.title] = of.best.tokens / row["step_s"]
    of_models = all(of.of_models for of in found)
    title = ("Largest model that trains" if of_models else "Largest batch that trains") + ", by trial (GB of device, of host)"
    draw_bar_panels(path, [Panel(title, "G parameters" if of_models else "sequences", sizes), Panel("Its speed", "tokens/s", speeds)])


def _line(of: Found, results: Results) -> list[str]:
    row = None if of.best is None else results.measured(of.best)
    failed = of.number(of.failed) + _grown(of)
    words = [of.caps, of.beside, of.base.title]
    if of.best is None or row is None:
        return ["-", *words, "-", failed, of.number(of.estimated), str(of.trials), *["-"] * 7]
    largest = f"**{row['params'] / 1e9:.2f} G** (`{of.best.size}`)" if of.of_models else f"**{of.best.batch}**"
    tokens_s = f"{of.best.tokens / row['step_s']:.0f}" + (" (short windows)" if is_short(row) else "")
    tokens_s += " (beside others)" if row.get("beside_others") else ""
    return [letter(results, row), *words, largest + (", or more" if of.why_open else ""), failed, of.number(of.estimated), str(of.trials),
            tokens_s, f"{row['spread']:.1%}", *_of_memory(row)]


def _grown(of: Found) -> str:
    """By how much what failed is larger than what trained."""
    if of.best is None or of.failed is None:
        return ""
    if of.of_models:
        return f" (+{shape_of(of.failed).params / shape_of(of.best).params - 1:.1%})"
    return f" (+{of.failed.batch / of.best.batch - 1:.1%})"


def _of_memory(row: Row) -> Iterator[str]:
    found = memory_of(row)
    for tier in TIERS:
        yield _pair(found[tier]) if tier in found else "-"
    held_gb = row.get("host_peak_gb", row.get("host_peak_rss_gb"))
    yield "-" if held_gb is None else f"{held_gb:.1f}"
    estimate, plan = row.get("estimate") or {}, row.get("plan")
    for before, ran in (("on_device", "gpu"), ("streamed", "stream")):
        yield "-" if plan is None else f"{_percent(estimate.get(before))}: {_percent(plan['share'][ran])}"


def _trials(results: Results) -> str:
    """Every trial in the file, as it came."""
    lines = []
    for case in results.cases():
        row = results.get(case) or {}
        found = memory_of(row)
        memory = (_pair(found[tier]) if tier in found else "-" for tier in TIERS)
        came_out = row.get("error", "trains").replace("|", "/")
        lines.append([letter(results, row), f"`{case.key}`", came_out, *memory, f"{row.get('wall_s', 0.0):.0f}"])
    head = ("run", "trial", "came out", *OF_MEMORY, "s")
    return f"## Trials\n\n{table(head, lines)}" if lines else ""


def _pair(memory: Memory) -> str:
    return f"{memory.before / 1e9:.1f}: {memory.measured / 1e9:.1f} ({memory.miss:+.1%})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
