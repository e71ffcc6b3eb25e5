"""The CPU trains a share of each batch: every bit is that of the same split in plain PyTorch.

The model is on the CPU here, so both parts are: what is proven is the split, the copy's weights and
how gradients are joined, wherever states rest.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.cpu_share import CpuShare, ShareTimes
from hytrain_fx.cost_model.share_and_states import Shared
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.sharing.loop import training_of
from hytrain_fx.sharing.placing import SharePlacing

from .loops import Twins, assert_same, compare, plain_loop, weights
from .models import autocast_gpt
from .share_loops import ByHand, gpt_of_eight, in_parts, noted_fetches
from .test_cut_parameters import cut_plan
from .test_placements import PLACES, plan_of

BY_CPU = 2  # of eight sequences: cpu_share=0.25
ANY = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(gpt_of_eight(request.param), cpu_share=0.25, workers=2, timeout_s=60.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand(BY_CPU)


@ANY
@given(
    plans=st.lists(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4), min_size=1, max_size=3),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 2000), max_size=2),
    batches=st.integers(1, 2),
)
def test_a_share_has_the_bits_of_the_split(
    twins: Twins, by_hand: ByHand, plans: list[list[Placement]], delays: dict[Stage, int], batches: int
) -> None:
    """Losses and weights are those of plain PyTorch, wherever states rest and however slowly.

    Also where several batches make a step.
    """

    def loop(model: Any, optimizer: Any, given: Any) -> list[float]:
        losses = []
        for places in plans:
            if model is twins.ours:
                twins.session.place(plan_of(twins.session, places))
            losses += in_parts(by_hand, 2, batches_a_step=batches)(model, optimizer, given)
        return losses

    twins.agree(loop, delays)


def clipped(model: Any, optimizer: Any) -> list[float]:
    return [float(clip_grad_norm_(model.parameters(), 0.05))]


def read(model: Any, optimizer: Any) -> list[float]:
    return [float(p.grad.float().sum()) for p in model.parameters()]


@pytest.mark.parametrize("after", [clipped, read])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_the_loop_does_to_gradients_is_done_to_the_sum(twins: Twins, by_hand: ByHand, after: Any, place: Placement) -> None:
    """The norm that clipping finds, and a gradient that is read, are those of the whole batch."""
    twins.session.place(plan_of(twins.session, [place]))
    twins.agree(in_parts(by_hand, 4, after=after))


def test_cut_parameters_are_shared(twins: Twins, by_hand: ByHand) -> None:
    """Pieces of one tensor in three places: the CPU's copy is of the whole weight."""
    twins.session.place(cut_plan(twins.session, [1, 2], PLACES))
    twins.agree(in_parts(by_hand, 3))


def test_weights_written_between_steps_reach_the_cpu(twins: Twins, by_hand: ByHand) -> None:
    """What the loop writes to a weight, both parts of the next batch are trained with."""

    def written(model: Any, optimizer: Any) -> list[float]:
        return [float(p.detach().float().sum()) for p in model.parameters()]

    def loop(model: Any, optimizer: Any, batches: Any) -> list[float]:
        losses = in_parts(by_hand, 2)(model, optimizer, batches)
        with torch.no_grad():
            for p in model.parameters():
                p.view(-1)[::3].mul_(1.5)
        return losses + in_parts(by_hand, 2, after=written)(model, optimizer, batches)

    for place in PLACES:
        twins.session.place(plan_of(twins.session, [place]))
        twins.agree(loop)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_weights_that_come_back_after_a_batch_keep_their_masters(twins: Twins, by_hand: ByHand, place: Placement) -> None:
    """Both parts are trained with the halved weights, and the step goes on from the whole ones."""

    def halved(model: Any, optimizer: Any) -> list[float]:
        with torch.no_grad():
            for p, was in zip(model.parameters(), before, strict=True):
                p.copy_(was)
        return []

    before: list[torch.Tensor] = []

    def loop(model: Any, optimizer: Any, batches: Any) -> list[float]:
        losses = in_parts(by_hand, 2)(model, optimizer, batches)
        for _ in range(2):
            with torch.no_grad():
                before[:] = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.mul_(0.5)
            losses += in_parts(by_hand, 1, after=halved)(model, optimizer, batches)
        return losses + in_parts(by_hand, 2)(model, optimizer, batches)

    twins.session.place(plan_of(twins.session, [place]))
    twins.agree(loop)


def test_weights_that_the_cpu_updates_are_read_where_they_rest(twins: Twins, by_hand: ByHand) -> None:
    """The copy has memory of its own only for weights whose states are on the device."""
    for place, own in ((Placement.CPU, 0), (Placement.GPU, len(twins.session.table))):
        twins.session.place(plan_of(twins.session, [place]))
        twins.agree(in_parts(by_hand, 2))
        ours = training_of(twins.session).copy
        assert ours is not None
        assert ours.rows_with_memory == own


def test_frozen_weights_are_as_the_loop_has_them() -> None:
    """One that is frozen after `compile` stays. What is written to an untrained one is used."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    model[1].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(trained, lr=0.05), cpu_share=0.5, workers=1)
    batch = {"x": torch.randn(1, 8).expand(8, 8).contiguous(), "y": torch.zeros(8, dtype=torch.long)}
    before = model[0].weight.detach().clone()
    for change in ("freeze", "load"):
        if change == "freeze":
            model[0].weight.requires_grad_(False)
        else:
            with torch.no_grad():
                model[1].weight.mul_(3.0)
        losses = []
        for part in hytrain_fx.share(batch, model):
            loss = torch.nn.functional.cross_entropy(part.model(part.batch["x"]), part.batch["y"])
            (part.weight * loss).backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        assert model[0].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, before)
    hytrain_fx.close(model)


class Elsewhere(SharePlacing):
    """Finds that a share pays with states where they are not."""

    def __init__(self, planning: Planning) -> None:
        super().__init__(planning)
        self._of = planning

    def together(self, profile: Profile, times: ShareTimes) -> Shared:
        """All on the host, or on the device, and half of the batch."""
        k = 0 if self._of.plan.k else len(profile.units)
        plan = self._of.solver.at(k, profile, self._of.guard, self._of.discipline)
        return Shared(plan, times, CpuShare(4, 8, 1.0, 2.0, 4, 1.0, "the device"))


class TwoLayers(torch.nn.Module):
    """Its loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()  # type: ignore[no-any-return]


def test_states_move_for_a_share_and_back() -> None:
    """Before the next forward, with the same bits. Meanwhile no plan is made of what steps show."""

    def loop(model: Any, optimizer: Any, batches: Any) -> list[float]:
        steps = in_parts(split, 4)
        if find_session(model) is None:
            return [loss for _ in range(4) for loss in steps(model, optimizer, batches)]
        losses = steps(model, optimizer, batches)
        planning = session_of(model).planning
        before, placing = planning.plan, Elsewhere(planning)
        placing.solved(ShareTimes(8, 100.0, 10.0))
        placing.hold(True)
        losses += steps(model, optimizer, batches)
        assert planning.plan.k == (0 if before.k else len(before.rows))
        assert planning.plan.notes[-1] == "solved with the CPU's share: 1 us a step instead of 2 us"
        assert {str(of.placement) for of in session_of(model).states.placed} == {"cpu" if before.k else "gpu"}
        placing.hold(False)
        losses += steps(model, optimizer, batches)
        assert planning.plan.rows == before.rows
        return losses + steps(model, optimizer, batches)

    split = ByHand(BY_CPU)
    torch.manual_seed(0)
    compare(lambda: (TwoLayers(), [(torch.randn(8, 4),) for _ in range(3)]), loop, cpu_share=0.25, warmup_steps=1, replan_every=0)


def test_a_model_under_autocast_is_shared() -> None:
    """fp32 weights stay whole on the device, and the copy has them."""

    def make() -> Any:
        model, _ = autocast_gpt()
        torch.manual_seed(2)
        return model, [(torch.randint(0, 19, (8, 6)),) for _ in range(3)]

    compare(make, in_parts(ByHand(BY_CPU), 5), cpu_share=0.25, warmup_steps=1)


def test_a_step_is_left_out_where_the_cpus_part_is_not_finite(twins: Twins) -> None:
    """With `on_nonfinite="skip"` a NaN of the CPU's gradients leaves weights as they are."""
    _, optimizer = twins.restart()
    twins.session.place(plan_of(twins.session, [Placement.CPU]))
    twins.session.finite_steps.use("skip")
    before, left_out = weights(twins.ours), twins.session.finite_steps.count
    for scale in (1.0, float("nan")):
        for number, part in enumerate(hytrain_fx.share(twins.batches[0], twins.ours)):
            (part.weight * part.model(*part.batch) * (scale if number else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = weights(twins.ours)
        if scale == 1.0:
            assert any(not torch.equal(after[name], before[name]) for name in before)
            before = after
    assert_same(after, before)
    assert twins.session.finite_steps.in_words(2) is not None
    assert twins.session.finite_steps.count == left_out + 1
    twins.session.finite_steps.use("allow")


def test_the_torch_engine_shares_too() -> None:
    """Its masters of bf16 weights are whole, so the copy has memory of its own for them."""
    compare(gpt_of_eight(torch.bfloat16), in_parts(ByHand(BY_CPU), 3), cpu_share=0.25, engine="torch", k=0)


def test_the_copy_goes_with_the_compiled_model() -> None:
    """After `close` nothing keeps the copy, and the model trains on as a plain one."""
    model: Any = torch.nn.Linear(3, 2)
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), cpu_share=0.25)
    for part in hytrain_fx.share(torch.randn(8, 3), model):
        part.model(part.batch).sum().backward()
    held = training_of(session_of(model)).copy
    assert held is not None
    copied = weakref.ref(held.model)
    del held, part
    hytrain_fx.close(model)
    gc.collect()
    assert copied() is None
    assert model(torch.randn(8, 3)).requires_grad


def test_without_a_share_a_batch_comes_whole() -> None:
    """With `cpu_share=0`, without gradients, and for a batch of one sequence there is one part."""
    model: Any = torch.nn.Linear(3, 2)
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(8, 3)
    assert [(part.model, part.weight, len(part.batch)) for part in hytrain_fx.share(x, model)] == [(model, 1.0, 8)]
    hytrain_fx.close(model)
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), cpu_share=0.5)
    with torch.no_grad():
        assert [part.weight for part in hytrain_fx.share(x, model)] == [1.0]
    assert [part.weight for part in hytrain_fx.share(x[:1], model)] == [1.0]
    hytrain_fx.close(model)


def test_auto_measures_and_says_why_none_pays() -> None:
    """On a model that is on the CPU both parts take the same cores: the answer is 0, with times."""
    model, batches = gpt_of_eight(torch.float32)()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), cpu_share="auto", warmup_steps=1, replan_every=0)
    shares = []
    for step in range(60):
        for part in hytrain_fx.share(batches[step % 3], model):
            (part.weight * part.model(*part.batch)).backward()
            shares.append(1.0 - part.weight)
        optimizer.step()
        optimizer.zero_grad()
    said = hytrain_fx.explain(model).details()
    assert max(shares) > 0, "no share was ever tried"
    assert shares[-1] == 0.0
    assert 'note: cpu_share="auto": the CPU trains none of 8 sequences' in said
    assert " a step" in said
    hytrain_fx.close(model)


def test_a_plain_loop_on_a_model_with_a_share_is_the_plain_loop(twins: Twins) -> None:
    """Who does not call `share` trains as without it, here with batches of six sequences."""
    twins.agree(lambda model, optimizer, batches: plain_loop(3)(model, optimizer, [(tokens[:6],) for (tokens,) in batches]))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_gradients_in_slots_are_added_to_there(twins: Twins, by_hand: ByHand, place: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that the CPU updates no gradient comes back to the device; every bit is the same.

    However late it lands: the host waits before it adds.
    """
    twins.session.place(plan_of(twins.session, [place]))
    fetched = noted_fetches(monkeypatch, twins.session.engine)
    twins.agree(in_parts(by_hand, 3), delays={Stage.D2H: 1000})
    assert fetched == []
