"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("mtrl")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"
