"""`python -m guild` is the `guild` command."""

import sys

from guild.cli import main

sys.exit(main())
