"""`python -m fxsplit` is the `fxsplit` command."""

import sys

from fxsplit.cli import main

sys.exit(main())
