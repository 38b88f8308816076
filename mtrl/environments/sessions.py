"""The environments of responses whose rewards are still to be computed, by the id of the response."""

from __future__ import annotations

from mtrl.environments.pool import Session


class Sessions:
    """They stay open until the call of the generator after the next one: the rewards of two calls may be asked for
    together (those of sampled and of greedy responses), and late."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, Session]] = {}
        self._call = 0

    def __getitem__(self, id: str) -> Session:
        return self._open[id][1]

    def begin_call(self) -> None:
        """End those of calls before the last one."""
        self._call += 1
        for id, (call, session) in list(self._open.items()):
            if call < self._call - 1:
                session.close()
                del self._open[id]

    def add(self, id: str, session: Session) -> None:
        """One of the same id, of the last call, ends."""
        if id in self._open:
            self._open[id][1].close()
        self._open[id] = (self._call, session)
