"""How a batch is split for the CPU's share, what its parts weigh, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import hytrain_fx
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.sharing.batches import counted, moved, part_of, require_even, sequences_of

from .loops import assert_same, weights

Pair = namedtuple("Pair", "x y")


class Counting(nn.Module):
    """A linear layer with a buffer that each forward may write."""

    calls: torch.Tensor

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Any, Any]]:
    model, optimizer = _compiled(Counting())
    yield model, optimizer
    hytrain_fx.close(model)


def _compiled(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), cpu_share=0.5, **options)


@pytest.mark.parametrize("batch", [
    torch.arange(6).view(6, 1),
    (torch.arange(6), torch.arange(12).view(6, 2)),
    {"x": torch.arange(6), "more": [torch.arange(6), {"y": torch.arange(6.0)}], "scale": torch.tensor(2.0), "name": "one"},
    Pair(torch.arange(6), torch.arange(6)),
], ids=["tensor", "tuple", "nested", "named tuple"])
def test_parts_have_the_batches_structure(batch: Any) -> None:
    """Every tensor is cut at the same sequence, and what has no dimension is in both parts."""
    assert sequences_of(batch) == 6
    parts = [part_of(batch, 0, 4), moved(part_of(batch, 4, 6), torch.device("cpu"))]
    assert [sequences_of(part) for part in parts] == [4, 2]
    assert type(parts[0]) is type(batch)
    if isinstance(batch, dict):
        assert torch.equal(torch.cat([part["more"][1]["y"] for part in parts]), batch["more"][1]["y"])
        assert [(part["scale"], part["name"]) for part in parts] == [(torch.tensor(2.0), "one")] * 2
    elif isinstance(batch, tuple):
        assert torch.equal(torch.cat([part[1] for part in parts]), batch[1])


@pytest.mark.parametrize(("batch", "message"), [
    (torch.zeros(4, device="meta"), "is on meta"),
    ((torch.zeros(4), torch.zeros(3)), r"4 in batch\[0\] and 3 in batch\[1\]"),
    (torch.tensor(1.0), "no tensor with a dimension"),
    ({"x": torch.zeros(2), "names": ["a", "b"]}, "without tensors"),
    ((torch.zeros(4), object()), r"batch\[1\] is a object"),
], ids=["elsewhere", "other lengths", "scalar", "words", "object"])
def test_what_cannot_be_split_is_refused(batch: Any, message: str) -> None:
    """The message names the tensor and says what was expected."""
    with pytest.raises(UnsupportedError, match=message):
        sequences_of(batch)


LABELS = torch.tensor([[1, 2, 3], [4, -100, -100], [2, 2, -100], [1, 1, 1]])


@pytest.mark.parametrize("batch", [
    {"x": torch.zeros(4), "labels": LABELS}, (torch.zeros(4), LABELS.int()), {"x": torch.zeros(4), "attention_mask": LABELS != -100},
], ids=["labels", "in a tuple", "mask"])
def test_a_batch_that_counts_unevenly_needs_to_be_weighed(batch: Any) -> None:
    """Labels that losses leave out, and masks with zeros: `share` asks before it splits."""
    with pytest.raises(UnsupportedError, match="count unevenly in a mean"):
        require_even(batch)


def test_weights_are_those_of_what_is_counted() -> None:
    """A part's weight is its share of the labels that count; without `weigh`, of the sequences."""
    parts = [{"labels": LABELS[:2]}, {"labels": LABELS[2:]}]
    assert counted(parts, [2, 2], lambda part: (part["labels"] != -100).sum()) == [4 / 9, 5 / 9]
    assert counted([torch.zeros(3), torch.zeros(1)], [3, 1], None) == [0.75, 0.25]


COUNTS = [lambda part: -1, lambda part: 0, lambda part: float("nan"), lambda part: "two", lambda part: torch.ones(2)]


@pytest.mark.parametrize("count", COUNTS)
def test_counts_that_are_none_are_refused(count: Any) -> None:
    """Negative ones, nothing but zeros, NaN, words, several numbers."""
    with pytest.raises(UnsupportedError, match=r"weigh\(\) gave"):
        counted([torch.zeros(3), torch.zeros(1)], [3, 1], count)


def test_masked_losses_add_up_to_the_whole_batches(compiled: tuple[Any, Any]) -> None:
    """With `weigh` the parts' losses and gradients are those of the whole batch, up to rounding."""
    model, optimizer = compiled
    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([1, -100, 3, -100])}

    def weigh(part: Any) -> torch.Tensor:
        return (part["labels"] != -100).sum()  # type: ignore[no-any-return]

    whole = F.cross_entropy(model(batch["x"]), batch["labels"])
    whole.backward()
    expected = model.layer.weight.grad.clone()
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in hytrain_fx.share(batch, model, weigh=weigh):
        loss = part.weight * F.cross_entropy(part.model(part.batch["x"]), part.batch["labels"])
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(model.layer.weight.grad + 0, expected)
    optimizer.zero_grad()


def test_a_part_that_counts_nothing_is_not_trained_alone(compiled: tuple[Any, Any]) -> None:
    """The mean of no labels is NaN: the device has the whole batch."""
    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([1, 2, -100, -100])}
    parts = list(hytrain_fx.share(batch, compiled[0], weigh=lambda part: (part["labels"] != -100).sum()))
    assert [(part.weight, len(part.batch["x"])) for part in parts] == [(1.0, 4)]


def test_a_step_inside_the_loop_is_an_error(compiled: tuple[Any, Any]) -> None:
    """It would be one without the CPU's gradients."""
    model, optimizer = compiled

    def loop() -> None:
        for part in hytrain_fx.share(torch.randn(4, 3), model):
            part.model(part.batch).sum().backward()
            optimizer.step()

    with pytest.raises(UnsupportedError, match=r"optimizer\.step\(\) was called before share\(\) had come to its end"):
        loop()
    optimizer.zero_grad()


def test_gradients_of_a_loop_that_ended_in_an_error_are_not_trained(compiled: tuple[Any, Any]) -> None:
    """The next batch begins without what the CPU's part had made."""
    model, optimizer = compiled
    x = torch.randn(4, 3)
    for fails in (True, False):
        optimizer.zero_grad()
        parts = hytrain_fx.share(x, model)
        for number, part in enumerate(parts):
            part.model(part.batch).sum().backward()
            if fails and number:
                break  # as an error of the loop would
    found = model.layer.weight.grad.clone()
    optimizer.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, model.layer.weight.grad.clone())
    optimizer.zero_grad()


@pytest.mark.parametrize("trained", [1, 2])
def test_a_batch_that_was_left_half_way_is_an_error(compiled: tuple[Any, Any], trained: int) -> None:
    """After a `break` in either part no step is made of half a batch, and no other batch is added.

    Until its gradients are dropped, by zero_grad() or by hand.
    """
    model, optimizer = compiled
    x, before = torch.randn(4, 3), weights(model)

    def leave() -> None:
        for number, part in enumerate(hytrain_fx.share(x, model), 1):
            part.model(part.batch).sum().backward()
            if number == trained:
                break

    leave()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"optimizer\.step\(\) was called before share\(\) had come to its end"):
            optimizer.step()
        with pytest.raises(UnsupportedError, match=r"^share\(\) was called before share\(\) had come to its end"):
            next(hytrain_fx.share(x, model))
    assert_same(weights(model), before)
    model.zero_grad()
    optimizer.step()
    assert_same(weights(model), before)
    leave()
    optimizer.zero_grad()
    for part in hytrain_fx.share(x, model):
        part.model(part.batch).sum().backward()
    optimizer.step()
    assert not torch.equal(weights(model)["layer.weight"], before["layer.weight"])
    optimizer.zero_grad()


def test_gradients_that_are_dropped_between_the_parts_are_an_error(compiled: tuple[Any, Any]) -> None:
    """No step is made of half a batch, wherever zero_grad() and step() stand in the loop."""
    model, optimizer = compiled
    x, before = torch.randn(4, 3), weights(model)

    def naive() -> None:
        for part in hytrain_fx.share(x, model):
            optimizer.zero_grad()
            part.model(part.batch).sum().backward()
            optimizer.step()

    def dropping() -> None:
        for part in hytrain_fx.share(x, model):
            optimizer.zero_grad()
            part.model(part.batch).sum().backward()

    def between() -> None:
        for number, part in enumerate(hytrain_fx.share(x, model)):
            if number == 0:
                optimizer.zero_grad()
            part.model(part.batch).sum().backward()
            if number == 1:
                optimizer.step()

    def leaving() -> None:
        for part in hytrain_fx.share(x, model):
            optimizer.zero_grad()
            part.model(part.batch).sum().backward()
            break
        optimizer.step()

    def early(drop: Callable[[], None], accumulated: bool) -> Callable[[], None]:
        def loop() -> None:
            if accumulated:
                model(x).sum().backward()
            for number, part in enumerate(hytrain_fx.share(x, model)):
                part.model(part.batch).sum().backward()
                if number == 0:
                    drop()
            optimizer.step()

        return loop

    drops: tuple[Callable[[], None], ...] = (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), model.zero_grad)
    too_early = [early(drop, accumulated) for drop in drops for accumulated in (False, True)]
    called = r"optimizer\.step\(\) was called before share\(\) had come to its end"
    gone = "has dropped the gradients of the device's part"
    loops = ((naive, called), (dropping, gone), (between, called), (leaving, called), *[(loop, gone) for loop in too_early])
    for loop, message in loops:
        with pytest.raises(UnsupportedError, match=message):
            loop()
        assert_same(weights(model), before)
        optimizer.zero_grad()
        optimizer.step()
        assert_same(weights(model), before)


def test_backwards_after_the_loop_are_an_error(compiled: tuple[Any, Any]) -> None:
    """As those over a list of the parts are. The next batch has none of them."""
    model, optimizer = compiled
    x, before = torch.randn(4, 3), weights(model)
    optimizer.zero_grad()
    for part in list(hytrain_fx.share(x, model)):
        part.model(part.batch).sum().backward()
    for called in (optimizer.step, lambda: next(hytrain_fx.share(x, model))):
        with pytest.raises(UnsupportedError, match="found gradients of the CPU's part that came after share\\(\\) had ended"):
            called()
    assert_same(weights(model), before)
    optimizer.zero_grad()
    for part in hytrain_fx.share(x, model):
        part.model(part.batch).sum().backward()
    found = model.layer.weight.grad.clone()
    optimizer.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, model.layer.weight.grad.clone())
    optimizer.zero_grad()


NORMS = [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3, track_running_stats=True)]


@pytest.mark.parametrize("norm", NORMS)
def test_layers_that_see_the_whole_batch_are_refused(norm: nn.Module) -> None:
    """Batch normalisation, and running statistics; the message names the layer."""
    with pytest.raises(UnsupportedError, match="cpu_share with 1, a "):
        _compiled(nn.Sequential(nn.Linear(3, 3), norm))


def test_several_ranks_are_refused() -> None:
    """Each rank would split its batch otherwise; a process that trains on its own may share."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UnsupportedError, match="cpu_share with several ranks"):
            _compiled(nn.Linear(3, 3))
        model, _ = _compiled(nn.Linear(3, 3), process_group=False)
        hytrain_fx.close(model)
    finally:
        distributed.destroy_process_group()


def test_a_forward_that_writes_a_buffer_is_refused() -> None:
    """Model and copy would count their own calls."""
    model, _ = _compiled(Counting(writes=True))

    def loop() -> None:
        for part in hytrain_fx.share(torch.randn(4, 3), model):
            part.model(part.batch).sum().backward()

    with pytest.raises(UnsupportedError, match="has written a buffer of the model, one of calls"):
        loop()
    hytrain_fx.close(model)


def test_gradients_outside_the_optimizer_are_refused() -> None:
    """They would be those of a part of the batch."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model[0].parameters()), cpu_share=0.5)

    def loop() -> None:
        for part in hytrain_fx.share(torch.randn(4, 3), model):
            part.model(part.batch).sum().backward()

    with pytest.raises(UnsupportedError, match=r"1\.weight requires grad and is not in the optimizer"):
        loop()
    hytrain_fx.close(model)


class Stepping(Counting):
    """With a loss in a method of its own."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]


def test_a_compiled_method_is_compiled_in_the_copy_too() -> None:
    """`part.model.training_step` is the device's or the copy's; their gradients add up."""
    model: Any = Stepping()
    step, optimizer = hytrain_fx.compile(model.training_step, torch.optim.AdamW(model.parameters()), cpu_share=0.5)
    x = torch.randn(4, 3)
    step(x).backward()
    expected = model.layer.weight.grad.clone()
    optimizer.zero_grad()
    called = []
    for part in hytrain_fx.share(x, model):
        (part.weight * part.model.training_step(part.batch)).backward()
        called.append(part.model.training_step)
    assert called[0] is step
    assert hasattr(called[1], "_torchdynamo_orig_callable"), "the copy's method runs in plain Python"
    torch.testing.assert_close(model.layer.weight.grad.clone(), expected)
    hytrain_fx.close(model)


def test_a_plain_model_has_no_share() -> None:
    """`share` needs a compiled model."""
    with pytest.raises(UnsupportedError, match=r"this Linear is not compiled with hytrain_fx\.compile\(\)"):
        hytrain_fx.share(torch.zeros(2, 3), nn.Linear(3, 3))


def test_an_uneven_batch_is_refused_before_anything_is_split(compiled: tuple[Any, Any]) -> None:
    """With the first batch, not once a share is tried."""
    with pytest.raises(UnsupportedError, match="count unevenly"):
        next(hytrain_fx.share((torch.randn(4, 3), LABELS), compiled[0]))
