"""pretrain/run.py, but that each rank has its own data: differing.py data.path=OF_RANK_0:OF_RANK_1 ...arguments"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pretrain.job import main

    words = []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key == "data.path":
            word = f"{key}={value.split(':')[int(os.environ['RANK'])]}"
        words.append(word)
    sys.exit(main(words))
