"""The server of the page; it only reads runs. It answers only its own page: requests by pages of other sites and
methods other than GET are refused, and on this machine other Host headers. At an address that other machines reach,
every request needs the token of the address that `mtrl view` printed. Requests name runs by number and images by their
key in a step's table, never by path."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view import html_page as page
from mtrl.view.plain_json import to_json
from mtrl.view.query import Query, select
from mtrl.view.rollout_store import SORTED_BY
from mtrl.view.run_index import RunFolder

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_GROUP = 64  # responses of a group in one reply
TYPES = {".js": "text/javascript", ".css": "text/css"}
IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class Guard:
    """Refuses requests that our page does not make. Browsers send the origin of a request (Origin, Sec-Fetch-Site); a
    foreign DNS name that points to this machine shows in Host. With a token, Host proves nothing and may be anything: a
    machine has many names. The token is in the query of the page's address, and then in a cookie."""

    def __init__(self, app: Asgi, hosts: Sequence[str], token: str | None = None, port: int = 0) -> None:
        self.app, self.hosts, self.token = app, frozenset(hosts), token
        self.cookie = f"mtrl-view-{port}"  # cookies are common to all ports of a machine
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

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers, *self.new_cookie(scope)]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = [host.lower() for host in headers.getlist("host")]
        if len(hosts) != 1 or (self.token is None and hosts[0] not in self.hosts):
            return "this server only answers at its own address; open the address that mtrl view printed"
        if self.token is not None and not self.has_token(scope):
            return "this server needs its token; open the address that mtrl view printed, with ?token=.."
        is_link = scope["path"] == "/" and self.is_token(query_token(scope))  # from a chat or an e-mail to our page
        foreign = any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site"))
        origins = [origin.lower() for origin in headers.getlist("origin")]
        if (foreign and not is_link) or any(origin != f"http://{hosts[0]}" for origin in origins):
            return "a page of another site requested this"
        return None if scope["method"] in ("GET", "HEAD") else "this server is read-only"

    def has_token(self, scope: Scope) -> bool:
        cookies = [cookie_parser(line).get(self.cookie, "") for line in Headers(scope=scope).getlist("cookie")]
        return any(map(self.is_token, (query_token(scope), *cookies)))

    def is_token(self, text: str) -> bool:
        return self.token is not None and secrets.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def new_cookie(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The header that stores the token, for the page's own requests. Lax: also if a link of a chat led here."""
        if not self.is_token(query_token(scope)):
            return []
        return [(b"set-cookie", f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax".encode())]


def query_token(scope: Scope) -> str:
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str, port: int) -> list[str]:
    """The valid Host headers of a loopback address: the address and the loopback names."""
    own = f"[{host}]" if ":" in host else host
    return [f"{name}:{port}".lower() for name in (own, *LOOPBACK)]


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


class Api:
    """The handlers of the page's requests."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._runs = runs

    def runs(self, request: Request) -> Response:
        summaries = []
        for run in self._runs:
            with run.lock:
                with suppress(OSError):  # a file that was removed just now: the next request does without it
                    run.refresh()
                summaries.append(run.summary())
        return JsonReply({"runs": summaries, "sorted_by": SORTED_BY})

    def series(self, request: Request) -> Response:
        names = [name for name in request.query_params.get("names", "").split(",") if name]
        run = self._find_run(request)
        with run.lock:
            return JsonReply(run.history.series(names))

    def glossary(self, request: Request) -> Response:
        """A line on each metric of the runs."""
        lines: dict[str, str] = {}
        for run in self._runs:
            with run.lock:
                lines |= run.glossary()
        return JsonReply(lines)

    def rollouts(self, request: Request) -> Response:
        run, query = self._find_run(request), parse_query(request)
        with run.sorting:  # a large run takes long, so other requests must not wait for it
            return JsonReply(select(run.store, query))

    def response(self, request: Request) -> Response:
        store = self._find_run(request).store
        return JsonReply(store.response(get_int(request, "step"), get_int(request, "row")))

    def group(self, request: Request) -> Response:
        """All responses to the prompt of a response, or to the prompt with an id, which may come from another run."""
        step, name = get_int(request, "step"), request.query_params.get("id")
        store = self._find_run(request).store
        if name is None:
            row = get_int(request, "row")
        else:
            rows = store.rows(step, range(store.steps()[step]))
            row = next((each["row"] for each in rows if each["id"] == name), -1)
        members = store.response(step, row)["members"][:MAX_GROUP]
        return JsonReply([store.response(step, member) for member in members])

    def maps(self, request: Request) -> Response:
        return JsonReply(self._find_run(request).store.maps(get_int(request, "step"), get_int(request, "row")))

    def image(self, request: Request) -> Response:
        data = self._find_run(request).store.image(get_int(request, "step"), request.query_params.get("key", ""))
        media_type = next((name for start, name in IMAGES.items() if data.startswith(start)), None)
        if media_type is None:
            raise DamagedRecord("not an image")
        return Response(data, media_type=media_type, headers={"cache-control": "private, max-age=3600"})

    def config(self, request: Request) -> Response:
        return PlainTextResponse(self._find_run(request).config() or "")

    def _find_run(self, request: Request) -> RunFolder:
        return self._runs[get_int(request, "run")]


def get_int(request: Request, name: str) -> int:
    return parse_int(request.query_params.get(name, ""))


def parse_int(text: str) -> int:
    number = int(text) if len(text) <= 15 else -1
    if number < 0:
        raise ValueError(text)
    return number


def parse_query(request: Request) -> Query:
    given = request.query_params
    return Query(
        first_step=parse_int(given["from"]) if given.get("from") else None,
        last_step=parse_int(given["to"]) if given.get("to") else None,
        sort=given.get("sort", "step"),
        descending=given.get("order") == "desc",
        minimum={name: float(given[f"min_{name}"]) for name in SORTED_BY if given.get(f"min_{name}")},
        maximum={name: float(given[f"max_{name}"]) for name in SORTED_BY if given.get(f"max_{name}")},
        page=parse_int(given.get("page", "0")),
        size=parse_int(given.get("size", "50")),
    )


def make_error_handler(status: int, text: str) -> Callable[[Request, Exception], Response]:
    return lambda request, error: PlainTextResponse(f"{text}\n", status)


def index(request: Request) -> Response:
    return Response(page.served_page(), media_type="text/html", headers={"cache-control": "no-store"})


def static_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in {page.STYLE, *(f"{module}.js" for module in page.MODULES)}:
        raise KeyError(name)
    media_type = TYPES[name[name.rindex(".") :]]
    return Response(page.static(name), media_type=media_type, headers={"cache-control": "no-cache"})


def make_app(runs: Sequence[RunFolder], host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> Asgi:
    """The application, for the address that it is served at. Without a token only requests to this machine itself are
    answered."""
    api = Api(runs)
    handlers = (
        api.runs, api.series, api.glossary, api.rollouts, api.response, api.group, api.image, api.config, api.maps,
    )  # fmt: skip
    routes = [Route("/", index), Route("/static/{name}", static_file)]
    routes += [Route(f"/api/{handler.__name__}", handler) for handler in handlers]
    errors: dict[Any, Any] = {
        KeyError: make_error_handler(404, "not found"),
        IndexError: make_error_handler(404, "not found"),
        ValueError: make_error_handler(400, "invalid request"),
        DamagedRecord: make_error_handler(410, "this part of the record is damaged or was deleted by rotation"),
        OSError: make_error_handler(410, "this part of the record was deleted"),
    }
    return Guard(Starlette(routes=routes, exception_handlers=errors), allowed_hosts(host, port), token, port)
