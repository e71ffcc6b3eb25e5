"""What `optimizer.state[parameter]` gives: a copy of the entry, of which every change by key is written to the states at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Write = Callable[[dict[str, Any]], None]
"""Takes the entry as it is to be, empty for none. Raises ValueError, and changes nothing, where it does not fit."""


class StateEntry(dict[str, Any]):
    """A dict whose changes reach `write` before they show; a copy of it is a plain dict."""

    def __init__(self, entry: dict[str, Any], write: Write) -> None:
        super().__init__(entry)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        self._become({**self, key: value})

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._become({name: value for name, value in self.items() if name != key})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As dict's; written once."""
        self._become({**self, **dict(*args, **kwargs)})

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As dict's."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """As dict's."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """As dict's."""
        if not self:
            raise KeyError("the entry is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """As before the parameter's first step."""
        self._become({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def _become(self, entry: dict[str, Any]) -> None:
        self._write(entry)
        super().clear()
        super().update(entry)
