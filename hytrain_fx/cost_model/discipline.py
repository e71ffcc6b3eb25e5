"""How the runtime orders, gates and cuts the work.

A prediction must know this besides the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS, UNITS_AHEAD

Barrier = Literal["none", "before_forward", "zero_offload"]
CommitAt = Literal["backward_start", "backward_end"]


@dataclass(frozen=True)
class Discipline:
    """How the runtime orders and gates the work.

    barrier         "none": each layer's forward waits for its own update; "before_forward": the
                    forward waits for all (HyTrainDNN, CoTrain); "zero_offload": backward, copies,
                    updates and copies back one after the other
    commit_at       when the step is committed, before which no update begins: "backward_start" (or
                    the profile's time) or "backward_end"
    chunk_params    parameters in one piece of work, None = whole shares (then nothing is preempted)
    staging_params  parameters whose streamed states one slot on the device holds
    staging_slots   slots; each is taken from the load of a chunk until its states are back on the
                    host
    early_updates   updates by the CPU begin as gradients arrive, on a guess at the commit; their
                    weights still travel after it
    early_weights   with commit_at "backward_end", the time when factors such as clipping's are
                    known: weights of early updates, and streamed states as far as staging slots
                    are free, travel from the call of step() on, at the profile's time
    runs_ahead      the launching thread waits for the last step's updates only at the commit: the
                    step is committed as its backward begins, or later where the profile's
                    `launching_us` is longer than a step
    units_ahead     units whose weights are fetched from the host before the device needs them; for
                    each size of a unit the device has one slot more
    """

    barrier: Barrier = "none"
    commit_at: CommitAt = "backward_start"
    chunk_params: int | None = CHUNK_PARAMS
    staging_params: int = CHUNK_PARAMS
    staging_slots: int = STAGING_SLOTS
    early_updates: bool = False
    early_weights: bool = False
    runs_ahead: bool = False
    units_ahead: int = UNITS_AHEAD
