"""Reports at once if the Hugging Face hub cannot be reached. Its library would retry for half a minute."""

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

MODEL_FILES = ("config.json", "tokenizer_config.json")  # either means that the model, or tokenizer, is cached
TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def connection_error() -> str | None:
    """Why the hub cannot be reached; None if it can."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme)
    host = urlsplit(proxy) if proxy else hub
    port = host.port or (443 if host.scheme == "https" else 80)
    try:
        socket.create_connection((host.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return f"{host.hostname}: {error.strerror or error}"
    return None


def check_model_available(name: str) -> None:
    """Before a model or tokenizer is loaded by name: if the hub cannot be reached, use its cache (which is logged), or
    raise a ValueError if it is not cached."""
    if os.path.exists(os.path.expanduser(name)) or not is_model_id(name) or (why := connection_error()) is None:
        return
    if not any(isinstance(try_to_load_from_cache(name, file), str) for file in MODEL_FILES):
        raise ValueError(
            f"{name} is not a checkpoint directory and not in the cache of the Hugging Face hub, which cannot be "
            f"reached ({why}); name a directory, or download it on a machine with a network: hf download {name}"
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning("the Hugging Face hub cannot be reached (%s): %s is loaded from its cache", why, name)
        constants.HF_HUB_OFFLINE = True


def is_model_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextmanager
def use_cache_if_offline(name: str) -> Iterator[None]:
    """While data is opened by name: if the name is a hub id and the hub cannot be reached, use only its cache."""
    source = name.rpartition("@")[0] or name
    exists = any(os.path.exists(os.path.expanduser(each)) for each in (name, source))
    is_hub_id = not exists and HUB_ID.fullmatch(source) and os.path.splitext(source)[1] not in OPENERS
    if not is_hub_id or (why := connection_error()) is None:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except DataError as error:
        missing = f"{name} is not a file or directory and not in the cache of the Hugging Face hub"
        raise DataError(f"{missing}, which cannot be reached ({why})") from error
    finally:
        constants.HF_HUB_OFFLINE = before
