"""`test_reads.json` of a run folder: the weights that were measured on the test split."""

from __future__ import annotations

import json

from mae_vit.core.files import write_json
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.runtime.collectives import run_on_rank_zero
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder

TEST_READS = "test_reads.json"


def record_test_read(config: FinetuneConfig, folder: RunFolder, best: BestWeights, ranks: Ranks) -> int:
    """Notes that weights are about to be measured on the test split; collective.

    Returns:
        How many different weights of this folder were measured so far: more than 1 after `--extend`.
    """
    train = config.train
    weights = {"step": best.step, "epochs": train.epochs, "steps": train.steps, "samples": train.samples}

    def record() -> int:
        path = folder.path / TEST_READS
        reads = json.loads(path.read_text()) if path.exists() else []
        # A run that was killed in the middle measures the same weights again.
        if weights not in reads:
            reads.append(weights)
            write_json(path, reads)
        return len(reads)

    return run_on_rank_zero(record, ranks)
