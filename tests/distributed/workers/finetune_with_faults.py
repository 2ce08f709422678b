"""finetune/run.py, with faults: finetuning.py [full=FILE] [late=FOLDER] [unread=1] [torn=1] [noted=1] ...arguments

With full=FILE, no room is left for the file of that name; with late=FOLDER, rank 1's run.dir is that one;
with unread=1 it cannot open the test split; with torn=1 it finds each checkpoint broken.
With noted=1 each rank says how many queries it scores.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path


def write_or_not(name: str, path: Path, content: bytes) -> None:
    from mae_vit.core.files import write_atomically

    if path.name == name:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    write_atomically(path, content)


def fail(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def find_broken(path: Path) -> None:
    from mae_vit.training.checkpoints.checkpoint import BrokenCheckpoint

    raise BrokenCheckpoint(f"{path}: not there yet")


def noted(score):
    def score_and_say(support, labels, query, **options):
        print(f"scored {len(query)} queries", flush=True)
        return score(support, labels, query, **options)

    return score_and_say


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.finetuning import results
    from mae_vit.finetuning.command import main
    from mae_vit.finetuning.data import FinetuneData
    from mae_vit.finetuning.frozen import closed_form
    from mae_vit.finetuning.frozen import score as frozen
    from mae_vit.training.checkpoints import checkpoint
    from mae_vit.training.outputs import run_folder

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
        elif key == "noted":
            for name in ("knn_scores", "least_squares_scores"):
                setattr(closed_form, name, noted(getattr(closed_form, name)))
        elif key == "torn":
            checkpoint.LATE_S = 0
            if rank:
                checkpoint.load_checkpoint = find_broken
        elif key != "late":
            words.append(word)
        elif rank:
            words.append(f"run.dir={value}")
    sys.exit(main(words))
