"""What of checkpoints that were read is still in memory while a run trains."""

import gc
import weakref

from mae_vit.training.checkpoints import checkpoint
from mae_vit.training.trainer import Trainer


class Leftovers:
    """Follows every tensor that is read from checkpoints; looks for them whenever training begins."""

    def __init__(self, monkeypatch) -> None:
        self.read: list[weakref.ref] = []
        self.alive: list[int] = []
        read_part, train = checkpoint.read_part, Trainer.train

        def following(path, part, described, **options):
            tensors = read_part(path, part, described, **options)
            # A run keeps the best weights, to save them again.
            self.read += map(weakref.ref, [] if part == "best" else tensors.values())
            return tensors

        def looking(trainer, *arguments):
            trainer.saver.close()  # what it writes lives until then
            gc.collect()
            kinds = (checkpoint.Checkpoint, checkpoint.TrainState)
            things = [thing for thing in gc.get_objects() if type(thing) in kinds]
            self.alive.append(len(things) + sum(tensor() is not None for tensor in self.read))
            return train(trainer, *arguments)

        monkeypatch.setattr(checkpoint, "read_part", following)
        monkeypatch.setattr(Trainer, "train", looking)
