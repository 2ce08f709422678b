"""`python -m mae_vit.cli`: the command `mae-vit`, for launchers that start modules."""

import sys

from mae_vit.cli.main import main

sys.exit(main())
