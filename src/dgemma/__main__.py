"""`python -m dgemma` is the `dgemma` command."""

import sys

from dgemma.cli import main

sys.exit(main())
