"""Ctrl-C and SIGTERM ask a run to stop: it finishes its step, saves and exits. A second Ctrl-C exits at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from mtrl.utils.terminal import say_at_once

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FINISHING = "finishing this step, then saving; Ctrl-C again to leave now, without saving"


class Interrupt:
    """
    with interrupt:                # handles the signals in here
        while not interrupt.asked():
            step()
    interrupt.leave()              # as the signal would have: KeyboardInterrupt, or exit status 143

    Signals are handled only in the main thread.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        return self.signal is not None

    def leave(self) -> None:
        """Exit as the signal would have; does nothing if there was none."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._listen) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _listen(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; a second Ctrl-C exits at once. SIGTERM does not: a scheduler may send it repeatedly."""
        if self.signal is None:
            self.signal = number
            say_at_once(f"\n{signal.Signals(number).name}: {FINISHING}")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
