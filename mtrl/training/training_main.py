"""python -m mtrl.training.training_main config=run.yaml a.b=c: the same as `mtrl train run.yaml a.b=c`."""

import sys

from mtrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
