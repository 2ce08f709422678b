"""Small objectives of every kind on small encoders, and a batch for them."""

from mae_vit.config.encoders import EncoderSection
from mae_vit.core.bands import RGB8, Bands
from mae_vit.models.patches import join_bins, mean_color_bins
from mae_vit.objectives.objective import Objective
from mae_vit.testing import batch_for, build_objective, read_model, read_objective

OPTIONS = {
    "mae": {"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "contrastive": {"group_size": 2},
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


def model_of(encoder_name: str) -> dict:
    """The `model` section of a config."""
    options = dict(ENCODERS[encoder_name])
    options["img_size"] = list(options["img_size"])
    return options if options.get("family") == "network" else {**_SIZE, **options}


def options_of(name: str, **changes) -> dict:
    """The `objective` section of a config."""
    name, variant = VARIANTS.get(name, (name, {}))
    return {"name": name, **OPTIONS.get(name, {}), **variant, **changes}


def section_of(encoder_name: str) -> EncoderSection:
    return read_model(model_of(encoder_name))


def takes(name: str, encoder_name: str) -> bool:
    """Whether an objective, with its options here, takes an encoder."""
    try:
        read_objective(options_of(name)).check_encoder(section_of(encoder_name))
    except ValueError:
        return False
    return True


def build(name: str, encoder_name: str, bands: Bands = RGB8, **changes) -> Objective:
    return build_objective(options_of(name, **changes), model_of(encoder_name), bands=bands)


batch_of = batch_for


def mean_color_classes(images, patch_size: int):
    """Mean colors of patches as classes: uint8 (B, C, H, W) -> int64 (B, N)."""
    return join_bins(mean_color_bins(images, patch_size))
