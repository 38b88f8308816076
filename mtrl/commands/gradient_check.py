"""What the credit rules of a configuration do to the gradient of its first step, for `mtrl compare`: a process of its
own, whose last line is JSON.

    python -m mtrl.commands.gradient_check CONFIG [a.b=c ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from mtrl.commands.load_arguments import started
from mtrl.compose.run import build, configure
from mtrl.training.gradient_effect import manipulation


def run(arguments: Sequence[str]) -> int:
    file, *overrides = arguments
    with tempfile.TemporaryDirectory() as folder:
        config, _ = configure(file, [*overrides, f"training.output_dir={folder}", "training.logger=[]"])
        training = started(build, config)
        with training.closing:
            found = manipulation(training.loop)
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
