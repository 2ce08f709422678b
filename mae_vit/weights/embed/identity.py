"""What features are of: saved with them, and compared before more are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mae_vit.core import __version__
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.weights.embed.features import Settings
from mae_vit.weights.embed.images import Images
from mae_vit.weights.encoder import PretrainedEncoder

_WEIGHTS, _DATA = ("digest", "mean", "std"), ("data_fingerprint", "data_images")
_OPTIONS = ("img_size", "pool", "precision", "dtype")


def make_facts(encoder: PretrainedEncoder, images: Images, settings: Settings) -> dict[str, Any]:
    """Describes an encoder, the images and the settings, as JSON."""
    info = encoder.info
    return {
        "tool": f"mae-vit {__version__}",
        "start": encoder.start.source,
        "digest": encoder.start.digest,
        "objective": info.objective,
        "step": info.step,
        "pool": encoder.pool,
        "img_size": list(info.img_size),
        "patch_size": info.patch_size,
        "embed_dim": encoder.embed_dim,
        "mean": list(info.mean),
        "std": list(info.std),
        "precision": settings.precision,
        "dtype": settings.dtype,
        "data": images.name,
        "data_images": len(images),
        "data_fingerprint": images.fingerprint,
        "labels": bool((images.labels >= 0).any()),
    }


def check_same_features(saved: dict[str, Any], facts: dict[str, Any], *, where: Path) -> None:
    """Compares what features were made of with what is asked for.

    Raises:
        InputError: naming what differs.
    """
    differing = {key for key in facts if saved.get(key) != facts[key]}
    reasons = []
    if differing.intersection(_WEIGHTS):
        others = "" if "start" in differing else " with other weights"
        reasons.append(f"START was {saved.get('start')}{others}")
    if differing.intersection(_DATA):
        count = count_of(saved.get("data_images", 0), "image")
        reasons.append(f"DATA was {saved.get('data')} as it was, {count}")
    elif "labels" in differing:
        reasons.append(f"DATA was taken {'with' if saved.get('labels') else 'without'} labels")
    for key in _OPTIONS:
        if key in differing:
            before, now = _format(saved.get(key)), _format(facts[key])
            reasons.append(f"--{key.replace('_', '-')} was {before}, not {now}")
    if reasons:
        raise InputError(
            f"{where} was made otherwise: {'; '.join(reasons)}: --restart begins again, another --out keeps it"
        )


def _format(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)
