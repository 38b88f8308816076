"""Where compiled kernels are kept, so that only the first run on a machine waits for all of them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"  # read by torch and Triton whenever they compile

logger = logging.getLogger(__name__)


def keep_compiled(place: Path) -> Path:
    """Has torch and Triton keep what they compile in `place`, and returns where that is: a user may have chosen another
    folder, and one that cannot be written to is left alone, which is said."""
    chosen = os.environ.get(INDUCTOR)
    if chosen and not is_temporary(Path(chosen)):
        return Path(chosen)
    place = place.absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        told = (
            "compiled kernels cannot be kept in %s (%s), only until the machine starts again; MTRL_CACHE names a folder"
        )
        logger.warning(told, place, error.strerror)
        return Path(chosen or tempfile.gettempdir())
    os.environ[INDUCTOR] = str(place)
    os.environ.setdefault(TRITON, str(place / "triton"))
    return place


def is_temporary(folder: Path) -> bool:
    """Whether this is torch's own choice, which it writes into the environment when it is imported."""
    return folder.parent == Path(tempfile.gettempdir()).absolute() and folder.name.startswith("torchinductor_")
