"""`python -m minisgl`: the same program as `minisgl`."""

import sys

from minisgl.cli.main import main

sys.exit(main())
