"""An error that one rank alone meets is told to the others, before the time limit tells them.

What this rank tells then is another point than theirs, so `Ranks.tell` raises RankError on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hytrain_fx.errors import RankError
from hytrain_fx.runtime.ranks import Ranks

_log = logging.getLogger("hytrain_fx")


@contextmanager
def told_to_ranks(doing: str, ranks: Callable[[], Ranks | None]) -> Iterator[None]:
    """Around what ranks do each for itself, where the next that they do together is a `tell`.

    doing   for messages: where this rank is, in a few words
    ranks   asked for in case of an error only

    The error itself is raised on this rank, once the others have come so far.
    """
    try:
        yield
    except RankError:
        raise  # the others have it too
    except Exception as error:
        with suppress(Exception):  # one that others have not come to hides no error
            others = ranks()
            if others is not None:
                told = f"an error in {doing} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
                _log.warning("rank %d tells the other ranks of %s", others.rank, told)
                others.tell(told, ())
        raise
