"""A plan as a page of text.

Who decided, from which figures, what is predicted, where each unit is updated and why.
"""

from __future__ import annotations

from collections.abc import Mapping

from hytrain_fx.ir.figures import bytes_text, count_text, table, time_text
from hytrain_fx.ir.plan import Placement, Plan

PLACE_WORDS = {Placement.GPU: "device", Placement.CPU: "CPU", Placement.STREAM: "streamed"}
SOURCE_WORDS = {
    "seed": "solved by HyTrainDNN's equation",
    "cotrain": "solved by CoTrain's equation",
    "windowed": "solved by the windows of each layer",
    "fixed k": "k was given",
    "loaded": "the plan was given",
    "first steps": "in force until times are measured",
}


def plan_text(plan: Plan) -> str:
    """All of a plan, with no profile at hand."""
    rows = [
        (str(row.unit), row.unit_name, count_text(row.numel), PLACE_WORDS[row.placement], row.reason)
        for row in sorted(plan.rows, key=lambda row: (row.unit, row.begin))
    ]
    parts = [headline(plan), table(("unit", "name", "parameters", "updated on", "reason"), rows, words=(1, 3, 4))]
    titled = (("solved from", plan.inputs), ("predicted", plan.predicted))
    parts += [f"{title}:\n{figures_text(figures)}" for title, figures in titled if figures]
    parts += ["\n".join(f"note: {text}" for text in plan.notes)] if plan.notes else []
    return "\n\n".join(parts) + "\n"


def headline(plan: Plan) -> str:
    """k, the number of units, and who decided."""
    units = len({row.unit for row in plan.rows})
    streamed, on_host = plan.numel(Placement.STREAM), plan.numel(Placement.CPU) + plan.numel(Placement.STREAM)
    share = f", {streamed / on_host:.0%} of the rest is streamed" if streamed else ""
    next_unit = plan.shares(plan.k) if plan.k < units else ()
    partly = sum(row.numel for row in next_unit if row.placement.rests_on_device) / max(sum(row.numel for row in next_unit), 1)
    first = "the first k" + (f" and {partly:.0%} of the next" if partly else "")
    who = SOURCE_WORDS.get(plan.source, plan.source)
    return f"plan: k = {plan.k} of {units} units ({first} are updated on the device){share}; {who}"


def place_of(plan: Plan, unit: int) -> str:
    """Where a unit is updated, with the shares where they differ."""
    shares = plan.shares(unit)
    numel = sum(share.numel for share in shares)
    if len({share.placement for share in shares}) == 1:
        return PLACE_WORDS[shares[0].placement]
    places = dict.fromkeys(share.placement for share in shares)
    sizes = {place: sum(share.numel for share in shares if share.placement == place) for place in places}
    return " + ".join(f"{size / numel:.0%} {PLACE_WORDS[place]}" for place, size in sizes.items())


def reason_of(plan: Plan, unit: int) -> str:
    """Why a unit is updated there: the reasons of its shares, each once."""
    return "; ".join(dict.fromkeys(share.reason for share in plan.shares(unit)))


def figures_text(figures: Mapping[str, float]) -> str:
    """Named figures one to a line, in the unit that their name ends in."""
    width = max(map(len, figures), default=0)
    return "\n".join(f"  {name.ljust(width)}  {figure_text(name, value)}" for name, value in figures.items())


def figure_text(name: str, value: float) -> str:
    """A figure by the unit in its name: `_us` a time, `_bytes` memory, `_share` per cent."""
    if name.endswith("_us"):
        return time_text(value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_share"):
        return f"{value:.1%}"
    return count_text(value)
