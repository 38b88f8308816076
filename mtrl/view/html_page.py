"""The HTML page: its modules and styles, served separately or in one file for a report."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from mtrl.view.plain_json import to_json

STATIC = Path(__file__).parent / "static"
STYLE = "view.css"
MODULES = ("main", "api", "dom", "state", "chart", "curves", "rollouts", "sample", "attention", "heat", "timing")
EMPTY_ICON = "data:,"  # otherwise browsers request an icon

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mtrl view</title>
<link rel="icon" href="{icon}">
{head}
</head>
<body>
<div id="app"><p class="loading">Opening …</p></div>
<noscript>This page needs JavaScript.</noscript>
{data}
<script type="module">{start}</script>
</body>
</html>
"""
START = 'import "mtrl/main";'


@cache
def static(name: str) -> bytes:
    return (STATIC / name).read_bytes()


def import_map() -> str:
    """The import map of the modules, which import each other as `mtrl/name` so that a report can embed them."""
    return json.dumps({"imports": {f"mtrl/{name}": f"/static/{name}.js" for name in MODULES}})


def served_page() -> str:
    head = f'<link rel="stylesheet" href="/static/{STYLE}">\n<script type="importmap">{import_map()}</script>'
    return SHELL.format(icon=EMPTY_ICON, head=head, data="", start=START)


def served_policy() -> str:
    """The content security policy: scripts, styles, images and data of this server only."""
    scripts = " ".join(f"'sha256-{digest(text)}'" for text in (import_map(), START))
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def single_page(data: object) -> str:
    """One file with scripts, styles and data, which makes no requests."""
    embedded = to_json(data).replace("<", "\\u003c")  # no text may close the script
    modules = {f"mtrl/{name}": "data:text/javascript;base64," + encoded(static(f"{name}.js")) for name in MODULES}
    style = static(STYLE).decode()
    policy = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
    )
    data_part = f'<script type="application/json" id="embedded">{embedded}</script>'
    return SHELL.format(icon=EMPTY_ICON, head=head, data=data_part, start=START)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def digest(text: str) -> str:
    return encoded(hashlib.sha256(text.encode()).digest())
