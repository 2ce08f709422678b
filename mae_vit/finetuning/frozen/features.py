"""Opens a frozen encoder with a fresh layer, and computes its features.

Shapes: n images, D width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from mae_vit.core.progress import progress
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.finetuning.models.classifiers import HEAD_STD, LARS_STD, make_head
from mae_vit.finetuning.results import gather_rows
from mae_vit.finetuning.setup import Setup
from mae_vit.training.engines.precision import autocast
from mae_vit.weights.encoder import ViTFeatures, load_features
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.timm_network import TimmEncoder


def open_frozen(setup: Setup, *, random: bool = False, say: bool = False) -> tuple[FeatureEncoder, nn.Linear]:
    """Opens the encoder with its pretrained weights; without any, or if `random`, with weights of the run's seed.

    `say` prints how they were loaded.

    Returns:
        The encoder, and a fresh layer on its features, D -> K, drawn from the run's seed.

    Raises:
        InputError: if the weights do not fit; names the difference.
    """
    config, data, weights = setup.config, setup.data, setup.pretrained
    model, finetune = config.model, config.finetune
    std = LARS_STD if config.optim.name == "lars" else HEAD_STD[finetune.head_init]

    torch.manual_seed(config.run.seed)
    images = ImageInput(model.image_hw, model.channels, data.mean, data.std, bands=data.bands)
    if weights is not None and weights.network is not None:
        images = replace(images, interpolation=weights.network.images.interpolation)
        encoder_of_timm = TimmEncoder(weights, images, random=random)
        if say:
            count = sum(value.numel() for value in encoder_of_timm.parameters())
            size = f"{images.img_size[0]}x{images.img_size[1]} px ({images.interpolation})"
            print(
                f"weights  {weights.source}: {model.name}, {weights.origin}; {count:,} parameters, all of the file; "
                f"{size}, {encoder_of_timm.num_features} features"
            )
        torch.manual_seed(config.run.seed)
        return encoder_of_timm, make_head(encoder_of_timm.num_features, len(data.classes), std)
    assert setup.info is not None
    encoder = setup.info.geometry.build(**model.drops)
    head = make_head(encoder.embed_dim, len(data.classes), std)
    fc_norm: nn.Module = nn.Identity()
    if random or weights is None:
        if encoder.has_final_norm:
            encoder.norm = nn.LayerNorm(encoder.embed_dim, eps=1e-6)
        if say:
            print("note: without --ckpt these are the features of random weights")
    else:
        report, fc_norm = load_features(weights, encoder)
        if say:
            print(report.describe(weights.source))
            if "fc_norm.weight" in weights.tensors and finetune.pool == "cls":
                print(
                    "note: these weights were fine-tuned with the mean of the patch tokens; finetune.pool=mean uses it"
                )
    return ViTFeatures(encoder, images, pool=finetune.pool, fc_norm=fc_norm), head


@dataclass(frozen=True)
class Frozen:
    """A run, its frozen encoder on the device, and a fresh layer on the features, D -> K, drawn from the run's seed."""

    setup: Setup
    encoder: FeatureEncoder
    head: nn.Linear

    @torch.no_grad()
    def features(self, source: AugmentedSource, samples: np.ndarray) -> torch.Tensor:
        """Encodes and pools images, each rank every world_size-th; leaves evaluation mode on; collective.

        Takes int64 (n,), numbers of samples in `source`; returns float32 (n, D) on the device, the same on all ranks.
        """
        setup, encoder, total = self.setup, self.encoder.eval(), len(samples)
        ranks, precision = setup.ranks, setup.config.train.precision
        assert precision != "auto", "`settle_precision` comes first"
        rows: list[torch.Tensor] = []
        bar = progress(
            total=len(range(ranks.rank, total, ranks.world_size)),
            desc="encoding",
            unit=" images",
            delay=2,
            leave=False,
            disable=ranks.rank > 0,
        )
        with autocast(setup.device, precision), bar:
            for batch in setup.data.fixed(source, samples, ranks, setup.batch_size):
                images = encoder.normalize(batch.to(setup.device).images)
                rows.append(encoder.features(images).float())
                bar.update(len(rows[-1]))
        return gather_rows(rows, (total, encoder.num_features), setup, torch.float32)

    def test_features(self) -> torch.Tensor:
        """Opens and encodes the test images: float32 (n, D) on the device; collective. Call it once."""
        return self.features(self.setup.data.open_test(), self.setup.data.test)

    def train_labels(self, samples: np.ndarray) -> torch.Tensor:
        """Returns the labels of samples of the training split, int64 (n,) on the device."""
        labels = np.asarray(self.setup.data.index.labels)[samples].astype(np.int64)
        return torch.from_numpy(labels).to(self.setup.device)

    @property
    def test_labels(self) -> np.ndarray:
        """The labels of the test images, int64 (n,)."""
        return np.asarray(self.setup.data.test_index.labels)[self.setup.data.test].astype(np.int64)
