"""pretrain/run.py, but that rank 1 has options of its own: SCRIPT ...arguments rank1=KEY=VALUE ..."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.pretraining.command import main

    words = [word for word in sys.argv[1:] if not word.startswith("rank1=")]
    own = [word.removeprefix("rank1=") for word in sys.argv[1:] if word.startswith("rank1=")]
    sys.exit(main([*words, *(own if os.environ["RANK"] == "1" else [])]))
