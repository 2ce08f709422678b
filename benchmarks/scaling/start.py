"""One start of a run over a data folder, in a process of its own: stages to the first step, memory, look-ups.

`benchmarks/scale.py` runs it over folders of many sizes; prints JSON.

    python benchmarks/scaling/start.py FOLDER [--order blocks]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # So that a checkout runs without being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.scaling.stages import main

    main()
