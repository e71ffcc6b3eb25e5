"""Decides when steps are measured, a plan is solved, and states move.

One machine of named states, from values alone.

    WARMING    the first steps run; nothing is measured yet
    ASKED      steps are to be measured, as soon as they run captured graphs
    MEASURING  steps are being measured
    DUE        they have been: a plan is solved before the next forward
    SETTLED    a plan is in force, and its steps are watched
    BALANCING  the same, while the streamed share moves towards ends of updates that lie together
    TRYING     all states are on the device, or all on the host are streamed, to see whether steps
               are shorter
    FIXED      the plan in force stays

After each step the controller is given a `StepReport`. What it shows is an event; so is the end of
an action, which the caller reports. `TRANSITIONS` has, for each state and event, the next state and
what to do.

A plan is looked at again for five reasons: a move is to be judged; steps have another length; they
take longer than with all states on the device; updates begin differently from what the plan was
solved for; updates of both kinds end apart. All of them share one `Patience`. The first four solve
k again. The last one moves the streamed share, and solves k only where the profile contradicts it.
Where updates end together, the caller may say that streaming all states is untried. All of them
wait while looks have taken more than their share of the time. What several ranks try begins and
ends where they have agreed on it (`agreed_trials`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.planning.agreed_trials import Told
from hytrain_fx.planning.watches import REST_STEPS, Lengths, Patience, Promise, StepReport, Trial

_ENDS_STEPS = 4  # steps between two looks at when updates end
# steps in a row in which the runtime works differently from what the plan was solved for
_OTHERWISE_STEPS = 8


class State(StrEnum):
    """Where the controller stands; the values are what `explain` prints."""

    WARMING = "warming up"
    ASKED = "about to measure steps"
    MEASURING = "measuring steps"
    DUE = "solving a plan before the next forward"
    SETTLED = "settled"
    BALANCING = "balancing the streamed share"
    TRYING = "trying another plan"
    FIXED = "fixed"


class Event(StrEnum):
    """What a step has shown, or how an action has ended."""

    STEPPED = "nothing new"
    ORDER_KNOWN = "the forward's order is known, in which a given k counts"
    READY = "the next step can be measured"
    MEASURED = "enough steps are measured"
    LOST = "what was measured is of no use"
    LOOK = "what a move has brought is to be seen"
    LENGTHS = "steps have another length"
    DISCIPLINE = "updates begin otherwise than the plan was solved for"
    SHORT = "memory ran out, and states leave the device"
    ROOM = "memory ran out, and may be free again"
    DOUBTED = "steps take longer than all states on the device would"
    DOUBT_CONFIRMED = "so they do with times measured again"
    ENDS = "enough steps have told when their updates end"
    # how an action has ended
    MOVED = "the solved plan is in force"
    STAYED = "the plan in force is better, or as good"
    UNMEASURED = "no profile could be made"
    FAILED = "an error came up"
    PLACED = "a plan that was not solved is in force"
    TOGETHER = "updates of both kinds end together"
    UNTRIED = "steps may be shorter with all states streamed, so that is tried"
    APART = "they end apart, and another share is predicted to repay its move"
    CONTRADICTED = "they end apart, and the profile says that no share would repay"
    REFUSED = "so it says with times measured again"
    PAID = "steps are shorter under the plan that was tried"
    VAIN = "steps are no shorter under the plan that was tried"
    FINAL = "the first solved plan is to stay"


class Action(StrEnum):
    """What the caller does."""

    NOTHING = "nothing"
    BEGIN = "measure the steps to come"
    FORGET = "forget what was measured"
    SOLVE = "solve a plan"
    RENEW = "put the given plan in force, in the forward's order"
    BALANCE = "look for a better streamed share"
    PLACE = "put the plan with that share in force"
    TRY = "put all states on the device"
    BACK = "put the plan before the trial in force"


_Next = tuple[State, Action]
_WATCHED: dict[Event, _Next] = {
    Event.LOOK: (State.MEASURING, Action.BEGIN),
    Event.LENGTHS: (State.MEASURING, Action.BEGIN),
    Event.ROOM: (State.ASKED, Action.NOTHING),
    Event.DISCIPLINE: (State.ASKED, Action.NOTHING),
    Event.DOUBTED: (State.ASKED, Action.NOTHING),
    Event.CONTRADICTED: (State.ASKED, Action.NOTHING),
    Event.DOUBT_CONFIRMED: (State.TRYING, Action.TRY),
    Event.UNTRIED: (State.TRYING, Action.PLACE),
    Event.APART: (State.BALANCING, Action.PLACE),
    Event.TOGETHER: (State.SETTLED, Action.NOTHING),
    Event.REFUSED: (State.SETTLED, Action.NOTHING),
    Event.FAILED: (State.SETTLED, Action.NOTHING),
}
_RULES: dict[State, dict[Event, _Next]] = {
    State.WARMING: {
        Event.ORDER_KNOWN: (State.WARMING, Action.RENEW),
        Event.READY: (State.MEASURING, Action.BEGIN),
    },
    State.ASKED: {Event.READY: (State.MEASURING, Action.BEGIN)},
    State.MEASURING: {
        Event.MEASURED: (State.DUE, Action.SOLVE),
        Event.LOST: (State.ASKED, Action.FORGET),
        Event.FAILED: (State.ASKED, Action.FORGET),
    },
    State.DUE: {
        Event.MOVED: (State.SETTLED, Action.NOTHING),
        Event.STAYED: (State.SETTLED, Action.NOTHING),
        Event.FAILED: (State.SETTLED, Action.NOTHING),
        Event.FINAL: (State.FIXED, Action.NOTHING),
        Event.UNMEASURED: (State.ASKED, Action.FORGET),
        Event.LOST: (State.ASKED, Action.FORGET),
    },
    State.SETTLED: _WATCHED | {Event.ENDS: (State.SETTLED, Action.BALANCE)},
    State.BALANCING: _WATCHED | {Event.ENDS: (State.BALANCING, Action.BALANCE)},
    State.TRYING: {
        Event.PAID: (State.SETTLED, Action.NOTHING),
        Event.VAIN: (State.SETTLED, Action.BACK),
        Event.FAILED: (State.SETTLED, Action.NOTHING),
        Event.SHORT: (State.SETTLED, Action.NOTHING),
    },
    State.FIXED: {},
}
TRANSITIONS: dict[tuple[State, Event], _Next] = {
    (state, event): _RULES[state].get(event, (state, Action.NOTHING)) for state in State for event in Event
}
"""Total: an event that a state has no rule for leaves everything alone."""
_WATCHING = (State.SETTLED, State.BALANCING)
# they do not say why things are so
_QUIET = (Event.STEPPED, Event.ORDER_KNOWN, Event.ENDS, Event.PLACED)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from an event, and why, in a sentence."""

    event: Event
    action: Action
    why: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the controller stands: what `explain` prints.

    `since` counts the finished steps when it came there; `patience` is its factor.
    """

    state: str
    why: str
    since: int
    patience: int

    def __str__(self) -> str:
        more = f"; {self.patience} times as much evidence as at first is asked for" if self.patience > 1 else ""
        return f"{self.state} since step {self.since}: {self.why}{more}"


class Controller:
    """The machine of one session.

        every         0 for a plan that stays once it is made
        window        steps measured for each plan
        solved_for    how the runtime worked when the plan was last solved, share and all; None: a
                      plan is due
    """

    def __init__(self, every: int, window: int) -> None:
        self.state = State.WARMING
        self.patience = Patience()
        self.solved_for: Discipline | None = None
        self._every, self._window = every, window
        self._why, self._since = "the first steps compile and warm up", 0
        self._report = StepReport(0, ())
        self._lengths = Lengths(every, window)
        self._promise = Promise()
        # reasons why times were measured again; the next sign of one confirms it
        self._measured_for: set[Event] = set()
        self._doubt_paid = False  # whether another plan came of it
        self._otherwise = 0  # steps in a row in which the runtime worked differently
        self._wish: str | None = None  # why all states on the device would be tried, if other ranks would too
        self._ended: Trial | None = None  # of this rank, while other ranks still try
        self._retry = 0  # count of finished steps from which steps are measured again, after errors

    @property
    def standing(self) -> Standing:
        """State and why, for people."""
        return Standing(str(self.state), self._why, self._since, self.patience.factor)

    @property
    def hope(self) -> float:
        """By how much predictions for states on the host were too short, as a trial has shown.

        1.0 again once steps have a new length.
        """
        return self._promise.hope

    @property
    def told(self) -> Told:
        """What other ranks are told of trials."""
        if self.state is State.TRYING:
            return Told.TRIES | (Told.NOTHING if self._ended is None else Told.PAID if self._ended.paid else Told.VAIN)
        if self.state is State.FIXED:
            return Told.HAS_ON_DEVICE | Told.HAS_STREAMED
        return Told.WANTS_ON_DEVICE if self._wish else Told.NOTHING

    @property
    def may_try(self) -> bool:
        """Whether a trial can begin now."""
        return self.state in _WATCHING and not self._promise.rests(self._report)

    def saw(self, report: StepReport) -> Decision:
        """A step has ended."""
        self._report = report
        return self.hear(*self._shown(report))

    def hear(self, event: Event, why: str = "") -> Decision:
        """What follows from an event.

        `why` is a sentence; without it the event speaks for itself.
        """
        if event in (Event.MOVED, Event.STAYED, Event.FAILED) and self.state is State.DUE and not self._every:
            event, why = Event.FINAL, f"{why or event}; no other plan is to follow"
        if event is Event.CONTRADICTED and event in self._measured_for:
            event = Event.REFUSED
        state, action = TRANSITIONS[self.state, event]
        was, self.state = self.state, state
        if state is not was:
            self._since = self._report.steps_done
            self._wish = self._ended = None
        if event not in _QUIET and (event in _RULES[was]) and (state is not was or event is not Event.TOGETHER):
            self._why = why or str(event)
        if event in _RULES[was] or event is Event.PLACED:
            self._follow(was, event)
        return Decision(event, action, why or str(event))

    # ---- what a step shows ----

    def _shown(self, report: StepReport) -> tuple[Event, str]:
        if self.state in (State.WARMING, State.ASKED):
            return self._before_measuring(report)
        if self.state is State.MEASURING and report.complete:
            lost = (Event.LOST, "none of the measured steps ran captured graphs")
            return lost if report.lost else (Event.MEASURED, self._why)
        if self.state is State.TRYING:
            return self._tried(report)
        return self._watched(report) if self.state in _WATCHING else (Event.STEPPED, "")

    def _before_measuring(self, report: StepReport) -> tuple[Event, str]:
        if report.order_known:
            return Event.ORDER_KNOWN, ""
        why = "times are needed for the first plan" if self.state is State.WARMING else self._why
        return (Event.READY, why) if report.can_measure and report.steps_done >= self._retry else (Event.STEPPED, "")

    def _tried(self, report: StepReport) -> tuple[Event, str]:
        self._promise.saw(report)
        self._ended = ended = self._ended or self._promise.trial()
        paid = None if ended is None else ended.paid if report.agreed is None else report.agreed.paid
        if ended is None or paid is None:
            return Event.STEPPED, ""
        why = ended.why if paid == ended.paid else f"{ended.why} here, and it was not so on another rank: all went back"
        return Event.PAID if paid else Event.VAIN, why

    def _watched(self, report: StepReport) -> tuple[Event, str]:
        """The first of the five reasons that applies."""
        self._promise.saw(report)
        if self._wish and report.agreed and report.agreed.begins is Told.WANTS_ON_DEVICE:
            return Event.DOUBT_CONFIRMED, self._wish
        if report.follows_ends:
            self._otherwise = self._otherwise + 1 if self._works_otherwise(report.discipline) else 0
        if not report.may_look:
            return Event.STEPPED, ""
        look = self._lengths.look(report) if report.can_measure else None
        if look is not None:
            return Event.LOOK, look
        change = self._lengths.change(report, self.patience) if report.can_measure else None
        if change is not None:
            self.patience = Patience() if change.is_new else self.patience.doubled()
            if change.is_new:
                self._promise.hope = 1.0  # it was learned from other steps
            return Event.LENGTHS, change.why
        keeps = self._promise.judged(report, self.patience)
        self._wish = None if keeps else self._wish
        if keeps and Event.DOUBTED in self._measured_for:
            self._measured_for.discard(Event.DOUBTED)
            self.patience = self.patience if self._doubt_paid else self.patience.doubled()
        elif keeps is False:
            return self._doubted(report)
        needed = self.patience.of(_OTHERWISE_STEPS)
        if self._otherwise >= needed:
            return Event.DISCIPLINE, f"updates have begun otherwise than the plan was solved for in {needed} steps in a row"
        ends = report.follows_ends and report.ends_seen >= self.patience.of(_ENDS_STEPS)
        return (Event.ENDS, "") if ends else (Event.STEPPED, "")

    def _works_otherwise(self, now: Discipline) -> bool:
        """How many units are brought ahead is solved with each plan, and does not count."""
        return self.solved_for is None or replace(now, units_ahead=self.solved_for.units_ahead) != self.solved_for

    def _doubted(self, report: StepReport) -> tuple[Event, str]:
        why = self._promise.broken_why(report)
        if Event.DOUBTED in self._measured_for:
            why = f"{why}, also with times measured again, so that is tried"
            if report.agreed is None:
                return Event.DOUBT_CONFIRMED, why
            self._wish = why
            return Event.STEPPED, ""
        return Event.DOUBTED, f"{why}, so times were measured again"

    # ---- what patience and the watches make of it ----

    def _follow(self, was: State, event: Event) -> None:
        done = self._report.steps_done
        match event:
            case Event.MOVED | Event.PAID:
                self._lengths.moved(self._report)
                self._doubt_paid = True
            case Event.STAYED | Event.FAILED if was is State.DUE:
                self._lengths.judged(self._report)
            case Event.DISCIPLINE:
                self._otherwise, self.solved_for = 0, None
            case Event.DOUBTED:
                self._measured_for.add(event)
                self.solved_for, self._doubt_paid = None, False
            case Event.CONTRADICTED:
                self._measured_for.add(event)
            case Event.DOUBT_CONFIRMED:
                self._promise.begin_trial(self._report)
            case Event.UNTRIED:
                self._promise.begin_stream_trial(self._report)
            case Event.UNMEASURED | Event.FAILED if was in (State.MEASURING, State.DUE):
                self._retry = done + (self.patience.factor - 1) * self._window
            case _:
                pass
        if event in (Event.PAID, Event.VAIN) or (event in (Event.FAILED, Event.SHORT) and was is State.TRYING):
            self._promise.rest(done + self.patience.of(REST_STEPS))
            self._measured_for.discard(Event.DOUBTED)
        if event in (Event.MOVED, Event.PLACED, Event.REFUSED):
            self._measured_for.discard(Event.CONTRADICTED)
        if event in (Event.MOVED, Event.STAYED, Event.FAILED, Event.PLACED):
            self._promise.restart()
        if event in (Event.DISCIPLINE, Event.REFUSED, Event.VAIN, Event.FAILED, Event.UNMEASURED):
            # what was done, or would have been, does not pay
            self.patience = self.patience.doubled()
