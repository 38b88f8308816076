"""The environments of responses whose rewards are still to be computed, by the id of the response."""

from __future__ import annotations

from mtrl.environments.pool import Session


class Sessions:
    """A step's environments stay open until the step after the next one begins: rewards may be asked for late."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, Session]] = {}

    def __getitem__(self, id: str) -> Session:
        return self._open[id][1]

    def add(self, step: int, id: str, session: Session) -> None:
        """One of the same id, of an earlier step, ends."""
        if id in self._open:
            self._open[id][1].close()
        self._open[id] = (step, session)

    def close_before(self, step: int) -> None:
        """End those of steps before the last one."""
        for id, (opened, session) in list(self._open.items()):
            if opened < step - 1:
                session.close()
                del self._open[id]
