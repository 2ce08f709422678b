"""A run's final weights: loads them, writes their file, and counts the test reads of the run folder."""

from __future__ import annotations

import json
import re
from typing import Any

from safetensors.torch import save as save_tensors
from torch import nn

from mae_vit.core.files import write_json
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.models.attention import choose_attention
from mae_vit.models.encoder_file import EncoderInfo, to_metadata
from mae_vit.runtime.ranks import Ranks, run_on_rank_zero, share_weights
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder

TEST_READS = "test_reads.json"
# Prefixes of the network within the trained model.
_HOLDERS = re.compile(r"^(encoder\.network|encoder|network)\.")


def load_chosen(model: nn.Module, best: BestWeights, predictor: Predictor) -> None:
    """Loads the chosen weights, which only rank 0 needs, onto the devices of all ranks; collective."""
    if predictor.ranks.rank == 0:
        model.load_state_dict(best.tensors, strict=True)
    model.to(predictor.device)
    share_weights(model, predictor.ranks)
    choose_attention(model, predictor.device)


def record_test_read(config: FinetuneConfig, folder: RunFolder, best: BestWeights, ranks: Ranks) -> int:
    """Records in `test_reads.json` that weights are about to be tested; collective.

    Returns:
        Number of different weights of this folder tested so far: more than 1 after `--extend`.
    """
    train = config.train
    weights = {"step": best.step, "epochs": train.epochs, "steps": train.steps, "samples": train.samples}

    def record() -> int:
        path = folder.path / TEST_READS
        reads = json.loads(path.read_text()) if path.exists() else []
        # A run that was killed while testing tests the same weights again.
        if weights not in reads:
            reads.append(weights)
            write_json(path, reads)
        return len(reads)

    return run_on_rank_zero(record, ranks)


def network_facts(config: FinetuneConfig, data: FinetuneData, info: EncoderInfo | None) -> dict[str, Any]:
    """Returns the metadata that describe a network: the encoder's geometry, or the network's name; and its images."""
    if info is not None:
        return info.to_dict()
    facts = {"network": config.model.name, "img_size": list(config.model.image_hw)}
    facts |= data.bands.to_entry()
    return {"mean": data.mean, "std": data.std, **facts, **data.preprocessing.to_entry()}


def model_bytes(model: nn.Module, metadata: dict[str, Any]) -> bytes:
    """Returns a network as a safetensors file: timm's names for our Vision Transformers, else the network's.

    `model` holds it as `encoder` or `network`; its other parts keep their names.
    """
    tensors = {
        _HOLDERS.sub("", name): value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    return save_tensors(tensors, metadata=to_metadata(metadata))
