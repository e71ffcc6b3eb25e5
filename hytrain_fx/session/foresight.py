"""Whether updates may begin before `step()`.

It learns what a loop does between its backward and its step, as a branch predictor does.

    the backward    `sent`: gradients have gone to their slots -> a guess at their items of the
                    commit, where the loop has been learned
    step()          `stepped`: was the guess right, or would it have been?
    zero_grad()     `dropped`: it was not, if gradients were there

Learned is a loop whose last `_STEPS` steps each reached `step()` late, with most gradients on the
host by then, or were updated on a guess at clipping's or a loss scale's factor from `step()` on. (A
plain loop on a GPU is there early, waits for no factor, and gains nothing.) And each step had every
gradient that went to its slot taken from there, made by one backward, with the hyper-parameters
that its group had during that backward. A step that undoes updates makes the next harder to earn.

A wrong guess costs time and nothing else: the engine puts back what it has updated
(csrc/early_updates.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from hytrain_fx.runtime.engine import CommitItem, Engine
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.session.commit import CommitBuilder

Speculate = bool | Literal["auto"]
_STEPS: Final = 4
_MOST_STEPS: Final = 64  # after steps that undid updates
_CALM_STEPS: Final = 16  # with right guesses, after which that is forgotten
_LATE: Final = 0.5  # share of the parameters on the host whose gradients have arrived when step() is reached, or whose factors are guessed


class Foresight:
    """Commits rows early, for one session.

    speculate     "auto" as above, True in every backward, False in none
    generation    by row: how often its gradient went to its slot (`GradientSlots.generation`)
    runs_behind   whether the device computes behind the launching thread. Where it does not (a CPU)
                  every step is late and none waits: there "auto" is False, as early updates would
                  only take cores from the backward
    """

    def __init__(
        self,
        speculate: Speculate,
        engine: Engine,
        builder: CommitBuilder,
        groups: Sequence[Mapping[str, Any]],
        generation: Sequence[int],
        runs_behind: bool,
    ) -> None:
        self._always = speculate is True
        self._watches = self._always  # during the backward; later also where steps are late
        self._is_off = speculate is False or not engine.can_begin_early or (speculate == "auto" and not runs_behind)
        self._engine = engine
        self._builder = builder
        self._groups = groups
        self._generation = generation
        self._group_of = builder.groups_by_row(groups)
        self._sent: dict[int, tuple[int, UpdateScalars]] = {}  # since the last step, by row: generation and guess
        self._numbers: dict[tuple[int, int], UpdateScalars] = {}  # guessed since the last step, by group and count of steps
        self._alike = 0  # last steps that were, or would have been, guessed right
        self._needed = _STEPS
        self._calm = 0  # last steps with early updates and none undone
        self._missed = 0
        self._awaits_factors = False

    @property
    def awaits_factors(self) -> bool:
        """Whether the last commit had factors to wait for, as those of clipping."""
        return self._awaits_factors

    @property
    def goes_ahead(self) -> bool:
        """Whether the updates of the next backward begin before its step."""
        return not self._is_off and (self._always or self._alike >= self._needed)

    @property
    def will_go_ahead(self) -> bool:
        """Whether updates begin before their steps, or soon will.

        They will if the loop goes on as in the last step.
        """
        return not self._is_off and (self._always or self._alike > 0)

    def sent(self, rows: Sequence[int]) -> None:
        """The gradients of these rows on the host are on their way to their slots."""
        if self._is_off or not self._watches:
            return
        if not self._sent:
            self._numbers.clear()
        items = self._builder.foreseen(rows, self._group_of, self._numbers)
        for item in items:
            self._sent.setdefault(item.row, (self._generation[item.row], item.scalars))
        if items and self.goes_ahead:
            self._engine.commit_early(items)

    def dropped(self) -> None:
        """Gradients were dropped."""
        if self._sent:
            self._sent.clear()
            self._alike = 0

    def stepped(self, items: Sequence[CommitItem]) -> None:
        """`step()` has committed these items."""
        counts = self._engine.early_counts()
        self._awaits_factors = counts.waiting_params > 0
        if self._is_off:
            return
        if self._always:
            self._sent.clear()
            self._refresh_groups()
            return
        went_ahead = self.goes_ahead
        missed, self._missed = counts.missed > self._missed, counts.missed
        self._watches = 0 < counts.host_params * _LATE <= max(counts.landed_params, counts.guessed_params)
        right = self._watches and bool(self._sent) and self._came_true(items)
        self._alike = self._alike + 1 if right and not missed else 0
        if missed:
            self._needed = min(2 * self._needed, _MOST_STEPS)
        self._calm = self._calm + 1 if went_ahead and right and not missed else 0
        if self._calm == _CALM_STEPS:
            self._needed = _STEPS
        if not right:
            self._refresh_groups()
        self._sent.clear()

    def _came_true(self, items: Sequence[CommitItem]) -> bool:
        """Whether each gradient was taken from its slot as one backward had left it.

        And with the numbers guessed.
        """
        found = {item.row: item.scalars for item in items if item.grad is None}
        same: dict[tuple[int, int], bool] = {}  # rows of a group share their scalars
        for row, (generation, guess) in self._sent.items():
            scalars = found.get(row)
            if scalars is None or self._generation[row] != generation:
                return False
            key = (id(scalars), id(guess))
            if key not in same:
                same[key] = scalars == guess
            if not same[key]:
                return False
        return True

    def _refresh_groups(self) -> None:
        """Read again which group has which row.

        A guess by an old one would be wrong again and again.
        """
        self._group_of = self._builder.groups_by_row(self._groups)
