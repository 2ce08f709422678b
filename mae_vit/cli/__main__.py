"""Runs `mae-vit` as a module (`python -m mae_vit.cli`), for launchers, or by this file's path, for comparisons."""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # This folder holds modules with names of the standard library, such as inspect.
    if sys.path[0] == here:
        del sys.path[0]
    # A checkout runs without being installed.
    if (library := os.path.dirname(os.path.dirname(here))) not in sys.path:
        sys.path.insert(0, library)
    from mae_vit.cli.main import main

    sys.exit(main())
