"""A persistent cache of compiled kernels, so that only the first run on a machine waits for them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"  # read by torch and Triton whenever they compile

logger = logging.getLogger(__name__)


def set_compile_cache(directory: Path) -> Path:
    """Make torch and Triton cache kernels in the directory, unless the user has chosen another one or it cannot be
    written to (which is logged). Return the directory in use."""
    chosen = os.environ.get(INDUCTOR)
    if chosen and not is_temporary(Path(chosen)):
        return Path(chosen)
    directory = directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        message = "compiled kernels cannot be stored in %s (%s) and are lost at the next reboot; set MTRL_CACHE"
        logger.warning(message, directory, error.strerror)
        return Path(chosen or tempfile.gettempdir())
    os.environ[INDUCTOR] = str(directory)
    os.environ.setdefault(TRITON, str(directory / "triton"))
    return directory


def is_temporary(folder: Path) -> bool:
    """Whether this is the default of torch, which it writes into the environment when it is imported."""
    return folder.parent == Path(tempfile.gettempdir()).absolute() and folder.name.startswith("torchinductor_")
