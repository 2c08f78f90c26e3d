"""`python -m gdnjax`."""

import sys

from gdnjax.cli import main

sys.exit(main())
