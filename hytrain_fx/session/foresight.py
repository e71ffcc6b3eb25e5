"""Whether updates may begin before `step()`.

It learns what a loop does between its backward and its step, as a branch predictor does.

    the backward    `sent`: gradients have gone to their slots -> a guess at their items of the
                    commit, where the loop has been learned
    step()          `stepped`: was the guess right, or would it have been?
    zero_grad()     `dropped`: it was not, if gradients were there

Learned is a loop whose last `_STEPS` steps reached `step()` late, with a tenth of the gradients on
the host by then on average, or were updated on a guess at clipping's or a loss scale's factor from
`step()` on. (A loop whose launching thread is far ahead of the GPU is there early, waits for no
factor, and gains nothing.) And each step had every gradient that went to its slot taken from there,
made by one backward, with the hyper-parameters that its group had during that backward. A step that
undoes updates makes the next harder to earn.

The ways are timed then, and the fastest stays (session/contest.py). Where nearly all gradients
are there, the loop seems to wait for the device, and updates go ahead first. It may also have done
so in its first steps alone, and be a step ahead of the device from then on.

A wrong guess costs time and nothing else: the engine puts back what it has updated
(csrc/early_updates.h).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from hytrain_fx.runtime.engine import CommitItem, Engine
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.session.commit import CommitBuilder
from hytrain_fx.session.contest import Contest

Speculate = bool | Literal["auto"]
_STEPS: Final = 4
_MOST_STEPS: Final = 64  # after steps that undid updates
_CALM_STEPS: Final = 16  # with right guesses, after which that is forgotten
_LATE: Final = 0.1
"""Of the parameters on the host: the share whose gradients have arrived when `step()` is reached,
or whose factors are guessed, on average.

Until then the CPU is idle. A GPT-2 XL, whose backward takes about as long to launch as to run, came
to `step()` with 0.1 to 0.6 of it done, and the CPU was idle for 80 ms of 360 in the worst step."""
_HELD_UP_S: Final = 0.02
"""Since the step before, by planning: the device has gone on meanwhile, and `step()` comes late.

A ConvNeXtV2-H on an H100, a step ahead of it else, came late to some in a row while plans were
predicted for 0.1 to 0.3 s each."""
_WAITS: Final = 0.97
"""The same for a loop that seems to wait for the device: the last gradients of one that does not
are still on their way."""


class _Sent(NamedTuple):
    """Rows whose gradients have gone to their slots.

    How often by then, and the guess at their scalars.
    """

    rows: tuple[int, ...]
    generations: list[int]
    scalars: UpdateScalars


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
        self._sent: list[_Sent] = []  # since the last step
        self._numbers: dict[tuple[int, int], UpdateScalars] = {}  # guessed since the last step, by group and count of steps
        self._lateness: deque[float] = deque([0.0] * _STEPS, maxlen=_STEPS)  # of the last steps: what `_LATE` compares
        self._alike = 0  # last steps that were, or would have been, guessed right
        self._needed = _STEPS
        self._calm = 0  # last steps with early updates and none undone
        self._missed = engine.early_counts().missed
        self._contest = Contest(engine.workers > 1)
        self._awaits_factors = self._guesses_factors = False

    @property
    def awaits_factors(self) -> bool:
        """Whether the last commit had factors to wait for, as those of clipping."""
        return self._awaits_factors

    @property
    def tried(self) -> str | None:
        """What trying the ways has shown, in a sentence; None where that was not done."""
        return self._contest.why

    @property
    def goes_ahead(self) -> bool:
        """Whether the updates of the next backward begin before its step."""
        return not self._is_off and (self._always or (self._is_learned and self._contest.early))

    @property
    def tries(self) -> bool:
        """Whether the ways are being tried, and none has been chosen."""
        return not self._is_off and not self._always and self._is_learned and self._contest.why is None

    @property
    def _is_learned(self) -> bool:
        return self._alike >= self._needed

    @property
    def will_go_ahead(self) -> bool:
        """Whether updates begin before their steps, or soon will.

        They will if the loop goes on as in the last step.
        """
        return not self._is_off and (self._always or (self._alike > 0 and self._contest.early))

    @property
    def will_begin_early(self) -> bool:
        """Whether updates will begin before their steps, or before their factors are known.

        The latter if most of the last commit's began so, on a guess at the factors.
        """
        return self.will_go_ahead or self._guesses_factors

    def sent(self, rows: Sequence[int]) -> None:
        """The gradients of these rows on the host are on their way to their slots."""
        if self._is_off or not self._watches:
            return
        if not self._sent:
            self._numbers.clear()
        goes_ahead = self.goes_ahead
        for scalars, of in self._builder.foreseen(rows, self._group_of, self._numbers):
            self._sent.append(_Sent(of, [self._generation[row] for row in of], scalars))
            if goes_ahead:
                self._engine.commit_early(of, scalars, self._contest.early_workers(self._engine.workers))

    def dropped(self) -> None:
        """Gradients were dropped."""
        if self._sent:
            self._sent.clear()
            self._alike = 0

    def stepped(self, items: Sequence[CommitItem], held_up_s: float = 0.0) -> None:
        """`step()` has committed these items.

        held_up_s   for so long the loop was held up, by what is not its own, since the last step
        """
        counts = self._engine.early_counts()
        self._awaits_factors = counts.waiting_params > 0
        self._guesses_factors = 2 * counts.guessed_params > counts.waiting_params
        if self._is_off:
            return
        if self._always:
            self._sent.clear()
            self._refresh_groups()
            return
        went_ahead = self.goes_ahead
        if held_up_s > _HELD_UP_S and not went_ahead:
            self._sent.clear()
            return
        missed, self._missed = counts.missed > self._missed, counts.missed
        self._lateness.append(max(counts.landed_params, counts.guessed_params) / counts.host_params if counts.host_params else 0.0)
        late = sum(self._lateness) / _STEPS
        if not went_ahead:  # launching takes longer beside early updates, and more gradients are there
            self._contest.try_first(late >= _WAITS)
        self._watches = late >= (_LATE / 2 if self._watches else _LATE)  # else plans go to and fro
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
        if self._is_learned:
            self._contest.stepped()
        else:
            self._contest.pause()

    def _came_true(self, items: Sequence[CommitItem]) -> bool:
        """Whether each gradient was taken from its slot as one backward had left it.

        And with the numbers guessed.
        """
        found = {item.row: item.scalars for item in items if item.grad is None}
        same: dict[tuple[int, int], bool] = {}  # rows of a group share their scalars
        for rows, generations, guess in self._sent:
            if [self._generation[row] for row in rows] != generations:
                return False
            for scalars in map(found.get, rows):
                key = (id(scalars), id(guess))
                if key not in same:
                    same[key] = scalars == guess  # None: the row was left out
                if not same[key]:
                    return False
        return True

    def _refresh_groups(self) -> None:
        """Read again which group has which row.

        A guess by an old one would be wrong again and again.
        """
        self._group_of = self._builder.groups_by_row(self._groups)
