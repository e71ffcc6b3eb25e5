"""The digest by which ranks compare what their loaders give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.loading import first_weights
from hytrain_fx.loading.first_weights import digest as digest_on

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)


def digest(flat: torch.Tensor) -> int:
    return digest_on(flat, torch.device("cpu"))


def drawn(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    words = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return words.view(dtype)


def test_each_bit_of_each_word_counts() -> None:
    """Also the highest, the sign of a weight, in words of odd and of even numbers."""
    words = torch.arange(1, 17, dtype=torch.int64)
    found = {digest(words)}
    for at in range(len(words)):
        for bit in range(64):
            other = words.clone()
            other[at] ^= (1 << bit) - (1 << 64) * (bit == 63)
            found.add(digest(other))
    assert len(found) == 1 + 16 * 64


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES), st.integers(2, 300), st.integers(0, 1 << 30), st.data())
def test_one_bit_and_the_order_change_it(dtype: torch.dtype, count: int, seed: int, data: st.DataObject) -> None:
    """Zeros of either sign and NaNs are bits as others. What is equal has the same digest."""
    flat = drawn(dtype, count, seed)
    within = torch.cat([flat[:1], flat])[1:]  # words of 8 bytes may begin inside of one of its memory's
    assert digest(flat) == digest(flat.clone()) == digest(within)
    bit = data.draw(st.integers(0, 8 * flat.nbytes - 1))
    other = flat.clone()
    other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert digest(other) != digest(flat)
    at = data.draw(st.integers(0, count - 2))
    swapped = flat.clone()
    swapped[at], swapped[at + 1] = flat[at + 1], flat[at]
    alike = torch.equal(swapped.view(torch.uint8), flat.view(torch.uint8))
    assert (digest(swapped) == digest(flat)) == alike


def spread(word: int) -> int:
    """Its bits all over it; as unsigned numbers."""
    word = (word ^ word >> 32) * 0xBF58476D1CE4E5B9 % 2**64
    return word ^ word >> 32


def test_it_is_the_same_however_much_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are of integers, modulo 2**64: also of values whose products are larger."""
    flat = torch.cat([drawn(torch.float64, 997, 3), torch.full((3,), -1, dtype=torch.int64).view(torch.float64)])
    whole = digest(flat)
    for at_once in (1, 7, 996, 1000):
        monkeypatch.setattr(first_weights, "_DIGESTED_AT_ONCE", at_once)
        assert digest(flat) == whole
    words = [spread(word % 2**64) for word in flat.view(torch.int64).tolist()]
    plain, numbered = sum(words), sum(word * number for number, word in enumerate(words, 1))
    assert whole == (plain * 0x9E3779B97F4A7C15 + numbered) % 2**64


def test_what_is_empty_has_one() -> None:
    """And so have ranks that load a tensor without elements."""
    assert digest(torch.empty(0, dtype=torch.bfloat16)) == 0
