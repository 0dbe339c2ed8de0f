"""`python -m guild` is the `guild` command."""

import sys

from guild.cli.main import main

sys.exit(main())
