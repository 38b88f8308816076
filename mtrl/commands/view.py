"""`mtrl view`: runs in the browser, while they go on or afterwards."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtrl.utils.errors import StartError
from mtrl.view.run_index import NoRun, RunFolder, open_runs

USAGE = "mtrl view RUN_DIR [RUN_DIR ...] [--port N] [--host ADDRESS] [--no-browser]"
PORT = 6060
TRIED = 20  # ports tried from there


def run(arguments: Sequence[str]) -> int:
    paths, host, port, browser = parse(arguments)
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise StartError(f"mtrl view needs {' and '.join(missing)}: pip install 'mtrl[view]'")
    try:
        runs = open_runs(paths)
    except (NoRun, OSError) as error:
        raise StartError(str(error)) from error
    with listen(host, port) as listening:
        serve(runs, host, listening, browser)
    return 0


def parse(arguments: Sequence[str]) -> tuple[list[Path], str, int | None, bool]:
    """(runs, host, port, whether a browser is opened)"""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    paths, host, port, browser = [], "127.0.0.1", None, sys.stdout.isatty()
    while words:
        word = words.pop(0)
        if word == "--no-browser":
            browser = False
        elif word in ("--host", "--port"):
            if not words:
                raise StartError(f"{word} needs a value; {USAGE}")
            value = words.pop(0)
            if word == "--host":
                host = value
            elif value.isdecimal() and int(value) < 2**16:
                port = int(value)
            else:
                raise StartError(f"--port: {value!r} is no port; a number from 0 (any free one) to 65535")
        elif word.startswith("--"):
            raise StartError(f"there is no option {word}; {USAGE}")
        else:
            paths.append(Path(word))
    if not paths:
        raise StartError(f"which run? {USAGE}")
    return paths, host, port, browser


def listen(host: str, port: int | None) -> socket.socket:
    """A socket at the port, or at the first free one from the usual port on."""
    asked = range(PORT, PORT + TRIED) if port is None else [port]
    error: OSError | None = None
    for number in asked:
        try:
            family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, number), family=family)
        except OSError as refusal:
            error = refusal
    where = f"{host}:{port}" if port is not None else f"{host}, ports {PORT} to {PORT + TRIED - 1}"
    raise StartError(f"{where} cannot be listened at ({error}); name another with --port or --host") from error


def serve(runs: Sequence[RunFolder], host: str, listening: socket.socket, browser: bool) -> None:
    import uvicorn

    from mtrl.view.server import make_app

    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/"
    print(f"{', '.join(each.name for each in runs)}: {address}  (Ctrl-C ends)", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("note: whoever reaches this address can read these runs; there is no password", file=sys.stderr)
    if browser:
        import webbrowser

        webbrowser.open(address)
    settings = uvicorn.Config(
        make_app(runs, host, port), log_level="warning", access_log=False, lifespan="off", server_header=False
    )
    uvicorn.Server(settings).run(sockets=[listening])
