"""A large first parameter between the CPU and streaming, so that both work on it at once.

The gradient of the first unit comes last in the backward, and its weight is needed first. Where one
parameter is most of it (an embedding, tied to the head or not), its whole update is exposed by one
kind of update while the other has nothing as urgent. Cut, it takes

    max( (1 - c) cpu ,  c states in + (1 - c) weights in )      with the share c of it streamed

which is least where both are equal. The streamed range comes first: whole chunks are sent before
new weights that the CPU has not updated. The simulator has the last word on c, and on any cut.

Only the first unit is cut. What the CPU updates of a cut parameter leaves the device at `step()`,
behind the whole backward (docs/design.md): the first unit's gradient is not there earlier anyway,
others would wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hytrain_fx.cost_model.pieces import Span
from hytrain_fx.cost_model.solution import Solution
from hytrain_fx.cost_model.streaming import nearest_run
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile, UnitProfile

# Share of all parameters. Where whole parameters come as near, none is cut.
_EVEN_SHARE = 0.01
# Of the share that ends both kinds together. A little less often ends earlier: a chunk of another
# unit's states is on the link when the gradient comes.
_PARTS_TRIED = (1.0, 0.85)
_CUT_SOLUTIONS = 3  # the fastest; each takes three plays


def level_params(unit: UnitProfile) -> float:
    """How many of the unit's parameters are streamed where both kinds of update end together."""
    slower_us = unit.cpu_update_us - unit.h2d_us
    return unit.params * max(slower_us, 0.0) / (max(slower_us, 0.0) + unit.stream_in_us) if unit.can_stream else 0.0


def cuts_of(profile: Profile, share: float) -> tuple[Span, ...]:
    """Ranges of the first unit's largest parameter to try streaming; () where it is to stay whole.

    They begin with it and are whole chunks. It stays whole where it may not be cut, where its
    weight rests on the host or in shards, and where whole parameters come near the best share.

    share   what is streamed of every other unit
    """
    unit = profile.units[0]
    grain, level, numels = unit.grain_params, level_params(unit), unit.param_numels
    if not (grain and level and numels) or unit.fetched_params or unit.gathered_params:
        return ()
    off_params = abs(level - sum(numels[i] for i in nearest_run(numels, level)))
    if off_params <= max(grain, _EVEN_SHARE * profile.params):
        return ()
    numel = max(numels)
    begin = sum(numels[: numels.index(numel)])
    wanted = (*(part * level for part in _PARTS_TRIED), share * unit.params)
    tried = dict.fromkeys(grain * round(params / grain) for params in wanted)
    return tuple(Span(begin, begin + streamed) for streamed in tried if 0 < streamed < numel)


def fastest(profile: Profile, whole: Sequence[tuple[Solution, Plan]], settle: Callable[[Solution], Plan], *, may_cut: bool = True) -> Plan:
    """The fastest of these plans, or of one with the first unit cut where that is 1% faster.

    whole    solutions and their plans, with predictions. Few of them, the fastest, are tried cut
    settle   makes a plan with its prediction. Raises PlanError where memory does not hold it
    """
    ordered = sorted(whole, key=lambda of: _step_us(of[1]))
    found = ordered[0][1]
    least_us = (1 - LEAST_GAIN_SHARE) * _step_us(found)
    may_be_cut = [of for of, made in ordered if may_cut and not made.k][:_CUT_SOLUTIONS]
    for solution in [_cut(profile.units[0], of, cut) for of in may_be_cut for cut in cuts_of(profile, of.share)]:
        with suppress(PlanError):  # the gradient of a cut parameter stays on the device
            made = settle(solution)
            if _step_us(made) <= least_us:
                found, least_us = made, _step_us(made)
    return found


def at_a_cut(profile: Profile, solution: Solution) -> tuple[float, int]:
    """What a cut takes of both memories, with k = 0.

    The share of all gradients that stay on the device until their update: those of what is
    streamed, and all of the first unit's where it is cut. And how many parameters' states are on
    the host twice while they are copied for the cut.
    """
    params = profile.units[0].params if solution.cut is not None else 0
    return solution.share + (1 - solution.share) * params / profile.params, params


def _step_us(plan: Plan) -> float:
    return plan.predicted["step_us"]


def _cut(first: UnitProfile, solution: Solution, cut: Span) -> Solution:
    """The same with the first unit cut, which gives both of its parts one reason."""
    def reason(unit: int, k: int) -> str:
        return solution.reason(unit, k) if unit else _reason(first, cut)

    def why_streamed(unit: int, k: int) -> str:
        return solution.why_streamed(unit, k) if unit else _reason(first, cut)

    return replace(solution, cut=cut, reason=reason, why_streamed=why_streamed)


def _reason(unit: UnitProfile, cut: Span) -> str:
    share = cut.numel / unit.params
    return (f"cut: the device updates {share:.0%} of it, whose states come in {time_text(share * unit.stream_in_us)}, beside the CPU, "
            f"which takes {time_text((1 - share) * unit.cpu_update_us)} for the rest; its gradient comes last and its weight is needed "
            "first")
