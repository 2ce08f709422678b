"""pretrain/run.py, but that rank 1 has a folder of its own: differing.py data.path=OF_RANK_0:OF_RANK_1 ...arguments

With late=FOLDER, its run.dir is that one.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.pretraining.job import main

    rank = int(os.environ["RANK"])
    words, late = [], []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key == "late":
            late = [f"run.dir={value}"] if rank else []
        elif key == "data.path" and ":" in value:
            words.append(f"{key}={value.split(':')[rank]}")
        else:
            words.append(word)
    sys.exit(main([*words, *late]))
