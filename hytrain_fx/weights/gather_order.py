"""In which order one run of a graph gathers units from all ranks, and sends gradients meanwhile.

    needed         a node is about to read a unit: it and those before it, and some ahead
    before_turn    gradients are about to go from rank to rank: what comes before them

One order of all collectives: that of the graph's text, with each unit as far ahead as there are
slots. Only what is next may be begun. So no rank's pace decides what comes, only when.
"""

from __future__ import annotations

from collections.abc import Sequence

from hytrain_fx.errors import EngineError, RankError


class GatherOrder:
    """The order of one run.

    units    in the order in which the graph's text reads them first
    """

    def __init__(self, units: Sequence[int], gradients: Sequence[int], ahead: int) -> None:
        """`gradients`: by unit of `units`: how many nodes that make some the text has before it."""
        self.units = tuple(units)
        # Brought as early as that: gradients that the text has in between go after it.
        self._after = [gradients[max(0, place - ahead)] for place in range(len(self.units))]
        self._place = {unit: place for place, unit in enumerate(self.units)}
        self._ahead = ahead
        self._begun = 0
        self._turns = 0  # of gradients that have gone

    @property
    def begun(self) -> tuple[int, ...]:
        """The units that have been gathered, or are being."""
        return self.units[: self._begun]

    def only(self, sent: Sequence[bool], alike: bool) -> None:
        """Of the nodes that make gradients, in the text's order, these alone send them.

        `alike`: whether all ranks send the same, in the same order. Raises RankError, on every
        rank, where they do not, and gather weights in between.
        """
        if self.units and not alike:
            raise RankError('gradients that a backward makes differ between ranks: with weights="sharded" all ranks run the same graphs in '
                            'every forward and backward; use weights="resident" where a rank takes branches of its own')
        self._after = [sum(sent[:after]) for after in self._after]

    def needed(self, unit: int) -> Sequence[int]:
        """The units to gather now, in order: this one, all before it, and those ahead.

        Raises EngineError where gradients would have to go first that are not there.
        """
        place = self._place.get(unit)
        if place is None:
            return ()  # all ranks have it whole
        end = min(place + self._ahead + 1, len(self.units))
        late = [at for at in self._after[self._begun : end] if at > self._turns]
        if late:
            raise EngineError(f"internal: a graph reads weights earlier than its text says: {late[0] - self._turns} gradients come first "
                              "in the order of all ranks")
        return self._next(end)

    def before_turn(self) -> Sequence[int]:
        """The units that are gathered before the next gradients go; these count as gone then."""
        end = self._begun
        while end < len(self.units) and self._after[end] <= self._turns:
            end += 1
        self._turns += 1
        return self._next(end)

    def _next(self, end: int) -> Sequence[int]:
        begin, self._begun = self._begun, max(self._begun, end)
        return self.units[begin : self._begun]
