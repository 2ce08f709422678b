"""Small objectives of every kind on small encoders, and a batch for them."""

import torch

from mae_vit.config.encoders import ENCODERS as SECTIONS
from mae_vit.config.encoders import EncoderSection
from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.objectives.contrastive_mae import ContrastiveMAE
from mae_vit.objectives.objective import Objective

OPTIONS = {
    "mae": {"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "contrastive_mae": {
        **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2, "group_size": 2},
        "contrast_weight": 0.5,
    },
    "masked_patch": {},
    "joint": {"mae": {"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2}},
    "simmim": {},
    "supervised": {},
}
# Further ways of an objective that must keep the same promises.
VARIANTS = {
    "mae decoding a half": ("mae", {"decode_ratio": 0.5, "decoder_depth": 2}),
    "mae of blocks": ("mae", {"mask_unit": 2, "mask_ratio": 0.5}),
    "masked_patch 4x4": ("masked_patch", {"target": "downsized_4x4"}),
    "masked_patch pixels": ("masked_patch", {"target": "pixels_l2"}),
    "supervised mixed": ("supervised", {"mixup": 0.8, "cutmix": 1.0}),
    "supervised linear": ("supervised", {"head": "linear", "pool": "mean", "label_smoothing": 0.1}),
}
ENCODERS = {
    "tiny": {"img_size": (16, 16), "in_chans": 3, "pos_embed": "learnable"},
    "non-square": {"img_size": (8, 24), "in_chans": 3, "pos_embed": "learnable"},
    "one channel": {"img_size": (16, 16), "in_chans": 1, "pos_embed": "learnable"},
    "sincos": {"img_size": (16, 16), "in_chans": 3, "pos_embed": "sincos"},
    "class tokens": {"img_size": (16, 16), "in_chans": 3, "pos_embed": "learnable", "class_tokens": 3},
    "rotary": {"family": "vit_rope", "img_size": (8, 24), "in_chans": 3, "register_tokens": 2},
    "convolutions": {"family": "network", "name": "SmallResNet", "img_size": (16, 16), "in_chans": 3},
    "bands of a timm network": {
        **{"family": "network", "name": "timm:convnext_atto", "img_size": (32, 64), "in_chans": 4},
        "patch_size": 8,
    },
}
_SIZE = {"name": "tiny-cifar", "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def section_of(encoder_name: str) -> EncoderSection:
    options = dict(ENCODERS[encoder_name])
    family = options.get("family", "vit")
    options["img_size"] = list(options["img_size"])
    return SECTIONS[family].model_validate(options if family == "network" else {**_SIZE, **options})


def takes(name: str, encoder_name: str) -> bool:
    """Whether an objective, with its options here, takes an encoder."""
    name, variant = VARIANTS.get(name, (name, {}))
    section = OBJECTIVES[name].model_validate({"name": name, **OPTIONS.get(name, {}), **variant})
    try:
        section.check_encoder(section_of(encoder_name))
    except ValueError:
        return False
    return True


def build(name: str, encoder_name: str, bands: Bands | None = None, **changes) -> Objective:
    torch.manual_seed(0)
    name, variant = VARIANTS.get(name, (name, {}))
    model = section_of(encoder_name)
    encoder = model.geometry().build()
    section = OBJECTIVES[name].model_validate({"name": name, **OPTIONS.get(name, {}), **variant, **changes})
    channels = model.in_chans
    return section.build(encoder, mean=[0.4] * channels, std=[0.2] * channels, num_classes=5, bands=bands)


def unit_of(objective: Objective) -> int:
    """Rows that a loss takes together."""
    return 2 * objective.group_size if isinstance(objective, ContrastiveMAE) else 1


def batch_of(objective: Objective, start: int = 0, stop: int = 8) -> Batch:
    channels, (height, width) = objective.encoder.in_chans, objective.encoder.img_size
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, channels, height, width), dtype=torch.uint8, generator=generator)
    index = torch.arange(100, 108)[start:stop]
    return Batch(images[start:stop], index % 5, SampleKeys(3, 1, index))
