"""Look at runs in the browser: curves, and every recorded response token by token.

mtrl view RUN_DIR [RUN_DIR ...] [--port N] [--host ADDRESS] [--no-browser]

Follows a live run, opens a finished one, compares several: which tokens looked at the image, which were trained on, the
reward of each response. Also opens TRL's completions (parquet) and verl's rollouts (JSONL). Serves only this machine
unless --host is given (--host 0.0.0.0: every address of it); then the printed address has a token, which every request
needs. --port 0 takes any free port. Needs pip install 'mtrl[view]'.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtrl.commands.load_arguments import OptionParser, whole_number
from mtrl.utils.errors import StartError
from mtrl.view.run_index import NoRun, RunFolder, open_runs

PORT = 6060
PORTS = 20  # how many ports are tried, from PORT on
OPTIONS = OptionParser(__doc__)
OPTIONS.add_argument("--host", default="127.0.0.1")
OPTIONS.add_argument("--port", type=whole_number(0))
OPTIONS.add_argument("--no-browser", action="store_true")


def run(arguments: Sequence[str]) -> int:
    options, paths = OPTIONS.parse_paths(arguments)
    if not paths:
        OPTIONS.error("which run?")
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise StartError(f"mtrl view needs {' and '.join(missing)}: pip install 'mtrl[view]'")
    try:
        runs = open_runs([Path(path) for path in paths])
    except (NoRun, OSError) as error:
        raise StartError(str(error)) from error
    with listen(options.host, options.port) as server:
        serve(runs, options.host, server, open_browser=sys.stdout.isatty() and not options.no_browser)
    return 0


def listen(host: str, port: int | None) -> socket.socket:
    """A socket at the port, or at the first free one from PORT on."""
    ports = range(PORT, PORT + PORTS) if port is None else [port]
    error: OSError | OverflowError | None = None
    for number in ports:
        try:
            family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, number), family=family)
        except (OSError, OverflowError) as failure:  # the latter for a port above 65535
            error = failure
    where = f"{host}:{port}" if port is not None else f"{host}, ports {PORT} to {PORT + PORTS - 1}"
    raise StartError(f"cannot listen at {where} ({error}); choose another --port or --host") from error


def serve(runs: Sequence[RunFolder], host: str, server: socket.socket, open_browser: bool) -> None:
    from mtrl.view.http_server import make_server
    from mtrl.view.server import is_loopback, make_app

    port = server.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    url = page_address(host, port, token)
    print(f"{', '.join(each.name for each in runs)}: {url}  (Ctrl-C ends)", flush=True)
    if token is not None:
        note = "note: whoever has this address, with its token, can read these runs; it is sent without encryption"
        print(note, file=sys.stderr)
    if open_browser:
        import webbrowser

        webbrowser.open(url)
    make_server(make_app(runs, host, port, token)).run(sockets=[server])


def page_address(host: str, port: int, token: str | None) -> str:
    """The address to open. A server at all addresses (0.0.0.0) is named by the name of this machine."""
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
