"""The server behind the page: reads runs, changes nothing. It answers this machine's own page alone: another Host, a
request that another site's page makes, and anything but GET are refused; runs are named by number and images by what a
step's table says, so that no request names a path."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view import html_page as page
from mtrl.view.query import Query, select
from mtrl.view.rollout_store import SORTED_BY
from mtrl.view.run_index import RunFolder

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_TOGETHER = 64  # responses of a group that are sent at once
TYPES = {".js": "text/javascript", ".css": "text/css"}
IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class Guard:
    """Refuses what no page of ours asks for. Browsers tell where a request comes from (Origin, Sec-Fetch-Site); a name
    that someone else's DNS points here still stands in Host."""

    def __init__(self, app: Asgi, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)
        self.headers = [
            (b"content-security-policy", page.served_policy().encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"x-frame-options", b"DENY"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        if refusal := self.refusal(scope):
            await PlainTextResponse(refusal + "\n", 403)(scope, receive, send)
            return

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        await self.app(scope, receive, answer)

    def refusal(self, scope: Scope) -> str | None:
        given: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = given.get("host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return "this server answers its own address alone; open the address that mtrl view printed"
        if any(site not in ("same-origin", "none") for site in given.get("sec-fetch-site", [])):
            return "a page of another site asked for this"
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in given.get("origin", [])):
            return "a page of another site asked for this"
        if scope["method"] not in ("GET", "HEAD"):
            return "there is nothing to change here"
        return None


def allowed_hosts(host: str, port: int) -> list[str]:
    """Host headers of this server: its own address, and this machine's names for itself where those lead here."""
    try:
        address = ipaddress.ip_address(host)
        own = f"[{host}]" if address.version == 6 else host
        names = LOOPBACK if address.is_loopback or address.is_unspecified else ()
    except ValueError:
        own, names = host, (LOOPBACK if host == "localhost" else ())
    return [f"{name}:{port}".lower() for name in (own, *names)]


class JsonAnswers:
    """The answers to the page's questions."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = runs

    def about(self, request: Request) -> Response:
        found = []
        for run in self.runs:
            with run.lock:
                run.refresh()
                found.append(run.about())
        return JSONResponse({"runs": found, "sorted_by": SORTED_BY})

    def series(self, request: Request) -> Response:
        run, asked = self._run(request), request.query_params
        names = [name for name in asked.get("names", "").split(",") if name]
        with run.lock:
            return JSONResponse(run.history.series(names, whole(asked.get("after", "-1"), low=-1)))

    def rollouts(self, request: Request) -> Response:
        run, query = self._run(request), parse_query(request)
        with run.lock:
            return JSONResponse(select(run.book, query))

    def response(self, request: Request) -> Response:
        run, step, place = self._run(request), self._number(request, "step"), self._number(request, "row")
        with run.lock:
            return JSONResponse(run.book.response(step, place))

    def group(self, request: Request) -> Response:
        """All responses to the prompt of one, or to the prompt of an id: other runs may have asked it, too."""
        run, step, name = self._run(request), self._number(request, "step"), request.query_params.get("id")
        with run.lock:
            if name is None:
                place = self._number(request, "row")
            else:
                rows = run.book.rows(step, range(run.book.steps()[step]))
                place = next((row["row"] for row in rows if row["id"] == name), -1)
            members = run.book.response(step, place)["members"][:MOST_TOGETHER]
            return JSONResponse([run.book.response(step, member) for member in members])

    def maps(self, request: Request) -> Response:
        run, step, place = self._run(request), self._number(request, "step"), self._number(request, "row")
        with run.lock:
            return JSONResponse(run.book.maps(step, place))

    def image(self, request: Request) -> Response:
        run, step = self._run(request), self._number(request, "step")
        with run.lock:
            data = run.book.image(step, request.query_params.get("key", ""))
        kind = next((kind for start, kind in IMAGES.items() if data.startswith(start)), None)
        if kind is None:
            raise DamagedRecord("this is no image")
        return Response(data, media_type=kind, headers={"cache-control": "private, max-age=3600"})

    def config(self, request: Request) -> Response:
        return PlainTextResponse(self._run(request).config() or "")

    def _run(self, request: Request) -> RunFolder:
        number = self._number(request, "run")
        if number >= len(self.runs):
            raise KeyError(number)
        return self.runs[number]

    @staticmethod
    def _number(request: Request, name: str) -> int:
        return whole(request.query_params.get(name, ""))


def whole(text: str, low: int = 0) -> int:
    number = int(text) if len(text) <= 15 else -1
    if number < low:
        raise ValueError(text)
    return number


def parse_query(request: Request) -> Query:
    asked = request.query_params
    least = {name: float(asked[f"min_{name}"]) for name in SORTED_BY if asked.get(f"min_{name}")}
    most = {name: float(asked[f"max_{name}"]) for name in SORTED_BY if asked.get(f"max_{name}")}
    return Query(
        first=whole(asked["from"]) if asked.get("from") else None,
        last=whole(asked["to"]) if asked.get("to") else None,
        sort=asked.get("sort", "step"),
        descending=asked.get("order") == "desc",
        least=least,
        most=most,
        page=whole(asked.get("page", "0")),
        size=whole(asked.get("size", "50")),
    )


def refused(status: int, text: str) -> Callable[[Request, Exception], Response]:
    return lambda request, error: PlainTextResponse(f"{text}\n", status)


def index(request: Request) -> Response:
    return Response(page.served_page(), media_type="text/html", headers={"cache-control": "no-store"})


def file(request: Request) -> Response:
    name = request.path_params["name"]
    known = {page.STYLE, *(f"{module}.js" for module in page.MODULES)}
    if name not in known:
        raise KeyError(name)
    return Response(
        page.static(name), media_type=TYPES[name[name.rindex(".") :]], headers={"cache-control": "no-cache"}
    )


def make_app(runs: Sequence[RunFolder], host: str = "127.0.0.1", port: int = 0) -> Asgi:
    """The application, for the address that it is served at."""
    answers = JsonAnswers(runs)
    named = {
        "runs": answers.about, "series": answers.series, "rollouts": answers.rollouts, "response": answers.response,
        "group": answers.group, "image": answers.image, "config": answers.config, "maps": answers.maps,
    }  # fmt: skip
    routes = [Route("/", index), Route("/static/{name}", file)]
    routes += [Route(f"/api/{name}", endpoint) for name, endpoint in named.items()]
    handlers: dict[Any, Any] = {
        KeyError: refused(404, "there is no such thing"),
        IndexError: refused(404, "there is no such thing"),
        ValueError: refused(400, "this question cannot be answered"),
        DamagedRecord: refused(410, "this piece of the record is damaged, or was rotated away"),
        OSError: refused(410, "this piece of the record is gone"),
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), allowed_hosts(host, port))
