"""pretrain/run.py, but that one rank's losses are not finite, from a step on or at one.

poisoned.py RANK FIRST_STEP STOP_STEP ...arguments of pretrain/run.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.data.order.order import GlobalOrder
    from mae_vit.pretraining.command import main
    from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine

    rank, first, stop = (int(word) for word in sys.argv[1:4])
    forward = DeepSpeedEngine.forward

    def poisoned(self, batch):
        output = forward(self, batch)
        order = GlobalOrder(1497, 128, 0)
        place = {int(order.samples(0, step * 128, step * 128 + 1)[0]): step for step in range(11)}
        # Rank 0's first sample of a step of the first epoch tells the step; rank 1's is 64 further on.
        half = {int(order.samples(0, step * 128 + 64, step * 128 + 65)[0]): step for step in range(11)}
        step = (place if self.ranks.rank == 0 else half)[int(batch.keys.index[0])]
        if self.ranks.rank == rank and first <= step < stop:
            return output._replace(loss=output.loss * float("nan"))
        return output

    DeepSpeedEngine.forward = poisoned
    sys.exit(main(sys.argv[4:]))
