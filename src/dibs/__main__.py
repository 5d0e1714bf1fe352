"""``python -m dibs``: the command line, where the ``dibs`` script is not on the PATH."""

from __future__ import annotations

import sys

from dibs.cli import main

if __name__ == "__main__":
    sys.exit(main())
