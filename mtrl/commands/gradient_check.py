"""The effect of a configuration's credit rules on the gradient of its first step, for `mtrl compare`, in a separate
process. The last line is JSON.

    python -m mtrl.commands.gradient_check CONFIG [a.b=c ...]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType

from mtrl.commands.load_arguments import check_call
from mtrl.compose.run import build, configure
from mtrl.training.gradient_effect import measure_gradient_effect
from mtrl.utils.machine import stop_with_parent


def run(arguments: Sequence[str]) -> int:
    file, *overrides = arguments
    with tempfile.TemporaryDirectory() as folder:
        leave_on_sigterm(folder)
        config, _ = configure(file, [*overrides, f"training.output_dir={folder}", "training.logger=[]"])
        training = check_call(build, config)
        with training.closing:
            effect = measure_gradient_effect(training.loop)
    print(json.dumps(asdict(effect)))
    return 0


def leave_on_sigterm(folder: str) -> None:
    """Remove the folder and exit at once. An exception would be raised in whatever runs at that moment, and where a
    library ignores exceptions, as in callbacks, the check would go on for nobody."""

    def leave(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


if __name__ == "__main__":
    stop_with_parent()
    sys.exit(run(sys.argv[1:]))
