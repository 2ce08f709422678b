"""finetune/run.py, with faults: finetuning.py [full=FILE] [late=FOLDER] ...arguments

With full=FILE, no room is left for the file of that name; with late=FOLDER, rank 1's run.dir is that one.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path


def write_or_not(name: str, path: Path, content: bytes) -> None:
    from mae_vit.files import write_atomically

    if path.name == name:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    write_atomically(path, content)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from finetune import frozen, results
    from finetune.job import main

    rank = int(os.environ["RANK"])
    words = []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key == "full":
            results.write_atomically = frozen.write_atomically = partial(write_or_not, value)
        elif key != "late":
            words.append(word)
        elif rank:
            words.append(f"run.dir={value}")
    sys.exit(main(words))
