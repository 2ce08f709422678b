"""pretrain/run.py, but that clocks are ours: clocked.py [die=STEP] ...arguments of pretrain/run.py

Rank 0's clock, by which saves are due, goes on by a minute with each step. Rank 1's is years ahead. With
die=STEP rank 0 is killed before that step.
"""

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.pretraining.command import main
    from mae_vit.training.checkpoints.saver import Saver

    rank = int(os.environ["RANK"])
    # Launchers put words of their own before it.
    last = next((int(word.removeprefix("die=")) for word in sys.argv if word.startswith("die=")), None)
    words = [word for word in sys.argv[1:] if not word.startswith("die=")]
    due, save, steps = Saver.due, Saver.save, [0]

    def later(self) -> bool:
        steps[0] += 1
        if rank == 0 and steps[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return due(self)

    Saver.due = later
    # Written before training goes on, so that nothing depends on the disk.
    Saver.save = lambda *given, wait: save(*given, wait=True)
    Saver.__init__.__kwdefaults__["clock"] = lambda: 60.0 * steps[0] * (1 + 1e6 * rank)
    sys.exit(main(words))
