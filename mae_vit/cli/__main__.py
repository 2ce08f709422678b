"""`python -m mae_vit.cli`: the command `mae-vit`, for launchers that start modules; by its path for comparisons."""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # Its folder holds modules that are named as the standard library's are.
    if sys.path[0] == here:
        del sys.path[0]
    # So that a checkout runs without being installed.
    if (library := os.path.dirname(os.path.dirname(here))) not in sys.path:
        sys.path.insert(0, library)
    from mae_vit.cli.main import main

    sys.exit(main())
