"""pretrain/run.py, but that each rank notes what it computes: recorded.py notes=FILE ...arguments of pretrain/run.py

FILE.RANK gets a line for each sample: step, epoch, sample, digests of its pixels and of its mask.
"""

import json
import os
import sys
import zlib
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from mae_vit.objectives import mae
    from mae_vit.pretraining.command import main
    from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine
    from mae_vit.training.engines.torch_engine import TorchEngine

    # Launchers put words of their own before it.
    (said,) = (word for word in sys.argv if word.startswith("notes="))
    words = [word for word in sys.argv[1:] if word != said]
    notes = Path(f"{said.removeprefix('notes=')}.{os.environ.get('RANK', '0')}")
    masking, masks = mae.unit_masking, []

    def noting_mask(*arguments):
        drawn = masking(*arguments)
        masks.append(drawn.mask)
        return drawn

    def noted(forward):
        return lambda self, batch: recorded(forward, self, batch)

    def recorded(forward, self, batch):
        masks.clear()
        output = forward(self, batch)
        # On several ranks two passes before the first one lay out its buckets of gradients, with equal masks.
        assert len(masks) in (1, 3)
        mask = masks[-1]
        with notes.open("a") as file:
            for place, sample in enumerate(batch.keys.index.tolist()):
                pixels, hidden = (zlib.crc32(t[place].cpu().numpy().tobytes()) for t in (batch.images, mask))
                file.write(json.dumps([self.updates, batch.keys.epoch, sample, pixels, hidden]) + "\n")
        return output

    mae.unit_masking = noting_mask
    for engine in (DeepSpeedEngine, TorchEngine):
        engine.forward = noted(engine.forward)
    sys.exit(main(words))
