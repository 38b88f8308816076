"""The Hugging Face hub where it cannot be reached: one line at once. Its library would try again for half a minute."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

from mtrl.data import DataError
from mtrl.data.sources import HUB_ID, OPENERS

MODEL_FILES = ("config.json", "tokenizer_config.json")  # either shows that a model, or a tokenizer, is in the cache
SECONDS = 5.0  # how long a connection may take

logger = logging.getLogger(__name__)


def unreachable() -> str | None:
    """Why the hub cannot be reached, in words for the user; None where it can."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme)
    place = urlsplit(proxy) if proxy else hub
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        return f"{place.hostname}: {error.strerror or error}"
    return None


def seek_model(name: str) -> None:
    """Before a model or tokenizer is loaded by name: without the hub what is in its cache is used, which is said, or
    the name is refused."""
    if os.path.exists(os.path.expanduser(name)) or not is_model_id(name) or (why := unreachable()) is None:
        return
    if not any(isinstance(try_to_load_from_cache(name, file), str) for file in MODEL_FILES):
        raise ValueError(
            f"{name} is no checkpoint directory and not in the cache of the Hugging Face hub, which cannot be reached "
            f"({why}); name a directory, or download it where there is a network: hf download {name}"
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning("the Hugging Face hub cannot be reached (%s): %s is taken from its cache", why, name)
        constants.HF_HUB_OFFLINE = True


def is_model_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextmanager
def seeking_data(name: str) -> Iterator[None]:
    """While data are opened by name. The hub is asked for what is no file here and looks like an id; without it, its
    cache may hold the data."""
    place = name.rpartition("@")[0] or name
    here = any(os.path.exists(os.path.expanduser(each)) for each in (name, place))
    if here or not HUB_ID.fullmatch(place) or os.path.splitext(place)[1] in OPENERS or (why := unreachable()) is None:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except DataError as error:
        told = f"{name} is no file or directory and not in the cache of the Hugging Face hub"
        raise DataError(f"{told}, which cannot be reached ({why})") from error
    finally:
        constants.HF_HUB_OFFLINE = before
