"""Look at runs in the browser: curves, and every recorded response token by token.

mtrl view RUN_DIR [RUN_DIR ...] [--port N] [--host ADDRESS] [--no-browser]

Follows a live run, opens a finished one, compares several: which tokens looked at the image, which were trained on, the
reward of each response. Also opens TRL's completions (parquet) and verl's rollouts (JSONL). Serves only this machine
unless --host is given. --port 0 takes any free port. Needs pip install 'mtrl[view]'.
"""

from __future__ import annotations

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
    import uvicorn

    from mtrl.view.server import make_app

    port = server.getsockname()[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    print(f"{', '.join(each.name for each in runs)}: {url}  (Ctrl-C ends)", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("note: anyone who reaches this address can read these runs; there is no password", file=sys.stderr)
    if open_browser:
        import webbrowser

        webbrowser.open(url)
    settings = uvicorn.Config(
        make_app(runs, host, port), log_level="warning", access_log=False, lifespan="off", server_header=False
    )
    uvicorn.Server(settings).run(sockets=[server])
