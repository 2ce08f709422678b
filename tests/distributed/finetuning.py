"""finetune/run.py, with faults: finetuning.py [full=FILE] [late=FOLDER] [unread=1] [torn=1] ...arguments

With full=FILE, no room is left for the file of that name; with late=FOLDER, rank 1's run.dir is that one;
with unread=1 it cannot open the test split; with torn=1 it finds each checkpoint broken.
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


def fail(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def find_broken(path: Path) -> None:
    from mae_vit.checkpoint_files import BrokenCheckpoint

    raise BrokenCheckpoint(f"{path}: not there yet")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from finetune import frozen, results
    from finetune.data import FinetuneData
    from finetune.job import main
    from mae_vit.training import checkpoint, run_folder

    rank = int(os.environ["RANK"])
    words = []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key == "full":
            for module in (results, frozen, run_folder):
                module.write_atomically = partial(write_or_not, value)
        elif key == "unread":
            if rank:
                FinetuneData.open_test = fail
        elif key == "torn":
            checkpoint.LATE_S = 0
            if rank:
                checkpoint.load_checkpoint = find_broken
        elif key != "late":
            words.append(word)
        elif rank:
            words.append(f"run.dir={value}")
    sys.exit(main(words))
