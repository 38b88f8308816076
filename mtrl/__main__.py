"""`python -m mtrl` is `mtrl`."""

import sys

from mtrl.cli import main

sys.exit(main())
