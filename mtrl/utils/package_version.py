"""The version of the installed package, and of its code, which in a checkout changes between versions."""

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def package_version() -> str:
    try:
        return version("mtrl")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"


def code_version() -> str:
    """The version and a digest of all code."""
    return f"mtrl {package_version()}, {digest(path.read_bytes() for path in sorted(PACKAGE.rglob('*.py')))}"


def digest(contents: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for content in contents:
        whole.update(len(content).to_bytes(8, "big") + content)
    return whole.hexdigest()
