"""A program as the controller sees it.

Steps go in, and what the controller asks for is answered as the test says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.planning.agreed_trials import Agreed
from hytrain_fx.planning.controller import Action, Controller, Decision, Event
from hytrain_fx.planning.watches import StepReport

USUAL = Discipline()
COLD_STEPS = 2
MOVES = (Action.PLACE, Action.TRY, Action.BACK)


def stays(asked: Event) -> Event:
    """The plan in force is the best, whatever it was looked at for."""
    return Event.STAYED


@dataclass
class Program:
    """One that trains.

    solves     how solving ends, by what the steps were measured for
    balances   how the look for a better streamed share ends
    solved     finished steps at which a plan was solved
    moved      and at which states moved
    asked      what each was solved for
    looked     finished steps at which a better share was looked for
    may_look   whether there is time for looks at other plans
    """

    every: int = 20
    window: int = 5
    solves: Callable[[Event], Event] = stays
    balances: Callable[[], Event] = lambda: Event.TOGETHER
    solved: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    asked: list[Event] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)
    done: int = 0
    may_look: bool = True

    def __post_init__(self) -> None:
        self.controller = Controller(self.every, self.window)
        self.last = Event.READY  # why steps are being measured
        self._measured: int | None = None
        self._ends = 0
        self._us: list[float] = []
        self._works = USUAL

    def step(
        self, us: float = 1000.0, *, works: Discipline = USUAL, streams: bool = False, all_us: float | None = None,
        predicted_us: float | None = None, captured: bool = True, agreed: Agreed | None = None,
    ) -> Decision:
        """One step, and what follows from it."""
        self.done += 1
        self._us.append(us)
        self._works = works
        if self._measured is not None:
            self._measured += 1
        self._ends += streams
        return self._do(self.controller.saw(StepReport(
            self.done, tuple(self._us[-31:]), works, can_measure=captured and self.done >= COLD_STEPS,
            complete=self._measured is not None and self._measured >= self.window, follows_ends=streams, ends_seen=self._ends,
            may_look=self.may_look, predicted_us=predicted_us, all_on_device_us=all_us, agreed=agreed)))

    def steps(self, count: int, us: float = 1000.0, *, works: Discipline = USUAL, streams: bool = False) -> None:
        """`count` equal steps."""
        for _ in range(count):
            self.step(us, works=works, streams=streams)

    def _do(self, decision: Decision) -> Decision:
        if decision.action in MOVES:
            self.moved.append(self.done)
            self._ends = 0
            self.controller.hear(Event.PLACED)
        match decision.action:
            case Action.BEGIN:
                self._measured = 0
            case Action.FORGET:
                self._measured = None
            case Action.SOLVE:
                self._measured = None
                self.solved.append(self.done)
                self.asked.append(self.last)
                ended = self.solves(self.last)
                if ended is Event.MOVED:
                    self.moved.append(self.done)
                    self._ends = 0
                if ended is not Event.UNMEASURED:
                    self.controller.solved_for = self._works
                self._do(self.controller.hear(ended))
            case Action.BALANCE:
                self._ends = 0
                self.looked.append(self.done)
                self._do(self.controller.hear(self.balances()))
            case _:
                pass
        if decision.event not in (Event.STEPPED, Event.READY, Event.MEASURED, Event.ENDS):
            self.last = decision.event
        return decision
