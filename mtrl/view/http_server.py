"""The HTTP server: uvicorn, which by itself waits for ever for a request that was begun and never ends."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0  # time for a client to send the head of a request
CONNECTIONS = 512  # open at once; more are answered with 503


class TimedProtocol(H11Protocol):
    """Closes a connection whose next request is not complete after REQUEST_S."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._clear_deadline()
        elif self._deadline is None:  # the begin of another request; uvicorn limits the time before it
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self._close_if_idle)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_idle(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()


def make_server(app: Any) -> uvicorn.Server:
    settings = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=CONNECTIONS,
    )
    return uvicorn.Server(settings)
