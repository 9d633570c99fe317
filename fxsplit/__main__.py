"""`python -m fxsplit` is the `fxsplit` command."""

import sys

from fxsplit.cli.main import main

sys.exit(main())
