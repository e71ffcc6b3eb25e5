"""The table of states holds only what kernels can take."""

from __future__ import annotations

import pytest

from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.limits import MAX_STATES
from hytrain_fx.ir.states import ADAMW, Kernel, StateSpec, StateTable


def test_a_state_with_an_option_comes_last() -> None:
    """Kernels know the others by their place, also where a group leaves it out."""
    with pytest.raises(ConfigError, match="'largest', 'mean'"):
        StateTable(Kernel.ADAMW, "Adam", (StateSpec("largest", option="amsgrad"), StateSpec("mean")))
    assert ADAMW.under({"amsgrad": False}).names == ADAMW.names[:-1]


def test_a_table_has_no_more_states_than_kernels_take() -> None:
    """One more is refused when the table is made."""
    states = tuple(StateSpec(f"s{number}") for number in range(MAX_STATES + 1))
    assert StateTable(Kernel.ADAMW, "Adam", states[:-1]).tensors == 1 + MAX_STATES
    with pytest.raises(ConfigError, match=f"at most {MAX_STATES}"):
        StateTable(Kernel.ADAMW, "Adam", states)
