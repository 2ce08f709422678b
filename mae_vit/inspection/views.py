"""The views of an encoder: each has a picture, a text and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.image_rows import Picture, draw_rows, in_colors
from mae_vit.inspection.figures import (
    Table,
    View,
    by_depth,
    darkened,
    draw_tiles,
    in_false_color,
    similarity_grid,
)
from mae_vit.inspection.images import Samples
from mae_vit.inspection.measures import (
    attention_maps,
    attention_weights,
    feature_components,
    head_entropy,
    mean_attention_distance,
    position_similarity,
    rollout,
)
from mae_vit.inspection.reconstructions import Reconstruction, reconstruct
from mae_vit.models.encoders.base import Encoder
from mae_vit.objectives.objective import Objective
from mae_vit.weights.encoder import PretrainedEncoder

_SHOWN = 8
# Images to average over; ViT takes 128 (App. D.7).
_AVERAGED = 128
_MEASURED = 256
_SHOWN_IN_BANDS = 4
# With more bands, every second, third, ... is drawn.
_MOST_BANDS = 20


def all_views(model: PretrainedEncoder, objective: Objective | None, samples: Samples) -> Iterator[View]:
    """Yields all views; the later ones take longer."""
    yield from band_views(objective, samples)
    if objective is not None:
        yield from reconstruction_views(objective, samples)
    yield from attention_views(model, samples)
    yield position_view(model.encoder)
    yield feature_view(model, samples)


def band_views(objective: Objective | None, samples: Samples) -> Iterator[View]:
    """Draws each band of some images and a reconstruction in gray; nothing for 8-bit gray or RGB."""
    bands = samples.bands
    if bands.photographs:
        return
    chosen = list(range(0, len(bands.names), -(-len(bands.names) // _MOST_BANDS)))
    ends = ", ".join(f"{bands.names[band]} {bands.low[band]:g} to {bands.high[band]:g}" for band in chosen)
    scale = f"Black and white are the ends of each band's scale, in raw values: {ends}."
    unit = samples.unit(_SHOWN_IN_BANDS)
    yield View(
        "bands",
        f"Images by band ({len(bands.names)} of {bands.dtype})",
        f"Each band in gray, a row for each. {scale} Missing values are black.",
        draw_tiles([Picture(bands.names[band], unit[:, band : band + 1]) for band in chosen]),
    )
    if objective is None:
        return
    with torch.no_grad():
        rows = objective.pictures(samples.batch(1).to(objective.mean.device))
    yield View(
        "reconstructions-bands",
        "Reconstructions by band",
        f"One image, a column for each band. {scale}",
        draw_tiles([Picture(row.label, row.images[0, chosen][:, None]) for row in rows]),
    )


def reconstruction_views(objective: Objective, samples: Samples) -> Iterator[View]:
    """Draws the objective's predictions of masked patches."""
    batch = samples.batch(_MEASURED).to(objective.mean.device)
    reconstructions = reconstruct(objective, batch, shown=_SHOWN)
    names = list(dict.fromkeys(name for item in reconstructions for name in item.metrics))
    table: Table = (
        ["mask", "ratio", *names],
        [[item.kind, item.ratio, *(item.metrics.get(name) for name in names)] for item in reconstructions],
    )
    for kind in dict.fromkeys(item.kind for item in reconstructions):
        rows: list[Picture] = []
        for item in (item for item in reconstructions if item.kind == kind):
            *predicted, original = in_colors(item.rows, samples.bands, samples.picture_bands)
            label = f"{predicted[0].label}, {item.ratio:.0%}"
            if "psnr_db" in item.metrics:
                gain = f"{item.metrics['psnr_gain_db']:+.2f} over its baseline"
                label += f": {item.metrics['psnr_db']:.2f} dB, {gain}"
            rows += [predicted[0]._replace(label=label), *predicted[1:]]
        yield View(
            f"reconstructions-{kind.replace(' ', '-')}",
            f"Reconstructions, masks {kind}" if kind == "as trained" else f"Reconstructions, {kind} masks",
            "Masked input, prediction, prediction with the visible patches, and the original. The baseline needs no "
            "learning: it fills each patch with one color, its own where normalized pixels are predicted, else a mean "
            "of visible patches. Where a row says true patch mean and std, both come from the original patch: shapes "
            "and edges are predicted, brightness is not.",
            draw_rows([*rows, original]),
            _finding(reconstructions) if kind == reconstructions[0].kind else "",
            table,
        )


def _finding(reconstructions: Sequence[Reconstruction]) -> str:
    """Compares the predicted pixels with those of the baseline, under the first kind of masks at about MAE's ratio."""
    item = min(reconstructions, key=lambda item: abs(item.ratio - 0.75))
    gain = item.metrics.get("psnr_gain_db")
    if gain is None:
        return ""
    side = "better" if gain > 0 else "worse"
    return f"predicts pixels {abs(gain):.1f} dB {side} than a baseline that learns nothing ({item.ratio:.0%} masked)"


def attention_views(model: PretrainedEncoder, samples: Samples) -> Iterator[View]:
    """Draws maps by head, rollout, and how far and how widely heads look."""
    shown, depth = samples.shown(_SHOWN), len(model.encoder.blocks)
    weights = _attention_weights(model, samples.images[:_SHOWN])
    asked = "the mean over all patches"
    if model.pool == "cls":
        asked = "[CLS]" if model.encoder.num_prefix_tokens == 1 else "the mean over all class tokens"
    for block in sorted({0, depth // 2, depth - 1}):
        maps = attention_maps(weights[block], model.encoder.grid_size, query=model.pool).cpu()
        heads = [Picture(f"head {n + 1}", in_false_color(maps[:, n])) for n in range(maps.shape[1])]
        yield View(
            f"attention-block-{block + 1:02d}",
            f"Attention in block {block + 1} of {depth}",
            f"The images, then a map for each head: where {asked} looks (bright: more; each map has its own scale).",
            draw_tiles([shown, *heads]),
        )
    rolled = attention_maps(rollout(weights)[:, None], model.encoder.grid_size, query=model.pool)[:, 0].cpu()
    both = Picture("both", darkened(shown.images, rolled))
    yield View(
        "attention-rollout",
        "Attention rollout",
        f"Attention through all blocks down to the pixels, from {asked}: bright regions contribute most to the feature "
        "(Abnar & Zuidema 2020; ViT Fig. 6).",
        draw_tiles([shown, Picture("rollout", in_false_color(rolled)), both]),
    )
    yield from head_views(model, samples.images[:_AVERAGED])


def head_views(model: PretrainedEncoder, images: Tensor) -> Iterator[View]:
    """Draws how far each head looks, and how widely, over raw images (n, C, H, W)."""
    encoder = model.encoder
    sums = np.zeros((2, len(encoder.blocks), 1))
    for part in images.split(_SHOWN):
        weights = _attention_weights(model, part)
        of_blocks = [
            torch.stack(
                [mean_attention_distance(block, encoder.grid_size, encoder.patch_size), head_entropy(block)]
            )
            for block in weights
        ]
        sums = sums + torch.stack(of_blocks, dim=1).double().cpu().numpy() * len(part)
    distances, entropies = sums / len(images)  # (L, H) each
    same = torch.ones(1, 1, encoder.num_patches, encoder.num_patches)
    uniform = mean_attention_distance(same, encoder.grid_size, encoder.patch_size).item()
    tokens = encoder.num_prefix_tokens + encoder.num_patches
    rows: list[list[object]] = [
        [block + 1, head + 1, float(distances[block, head]), float(entropies[block, head])]
        for block, head in np.ndindex(*distances.shape)
    ]
    table = (["block", "head", "mean_attention_distance_px", "entropy_nats"], rows)
    label = "mean attention distance, px"
    first, last = distances.mean(axis=1)[[0, -1]]
    finding = f"looks {first:.1f} px away in its first block, {last:.1f} px in its last"
    yield View(
        "attention-distance",
        "Mean attention distance",
        "How many pixels away each head looks on average (ViT Fig. 7 right), a point for each head. Trained encoders "
        "have local and global heads in early blocks and global ones later; with random weights all are the same.",
        by_depth(distances, label, uniform=uniform, uniform_label="all patches equally"),
        f"{finding} ({uniform:.1f} px if it saw no difference between patches)",
        table,
    )
    label = f"all {tokens} tokens equally"
    yield View(
        "attention-entropy",
        "Entropy of attention",
        "How widely each head looks: low means at a few tokens, the dashed line at all equally.",
        by_depth(entropies, "entropy, nats", uniform=float(np.log(tokens)), uniform_label=label),
        table=table,
    )


def _attention_weights(model: PretrainedEncoder, images: Tensor) -> list[Tensor]:
    return attention_weights(model.encoder, model.normalize(images.to(model.encoder.cls_token.device)))


def position_view(encoder: Encoder) -> View:
    """Draws the similarity of position embeddings."""
    similarity = position_similarity(encoder.pos_embed, encoder.num_prefix_tokens).cpu().numpy()
    fixed = "The table is fixed (sin-cos), not learned."
    return View(
        "positions",
        "Similarity of position embeddings",
        "For each patch, the similarity of its position embedding to all others (ViT Fig. 7 center). A bright spot "
        "at the patch itself, and its row and column, mean that the grid was learned. Yellow is 1, dark blue "
        "-1. " + (fixed if "pos_embed" in encoder.fixed else ""),
        similarity_grid(similarity, encoder.grid_size),
    )


@torch.no_grad()
def patch_features(model: PretrainedEncoder, images: Tensor) -> Tensor:
    """Encodes raw images (n, C, H, W) to patch tokens (n, N, D) after the final norm, or that after the mean."""
    moved = model.normalize(images.to(model.encoder.cls_token.device))
    return model.patch_map(moved).flatten(2).transpose(1, 2)


def feature_view(model: PretrainedEncoder, samples: Samples) -> View:
    """Draws principal components of patch features as colors."""
    components, shares = feature_components(patch_features(model, samples.images[:_SHOWN]))
    low, high = components.flatten(0, 1).aminmax(dim=0)
    colors = (components - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    maps = colors.movedim(-1, 1).unflatten(2, model.encoder.grid_size)
    return View(
        "features",
        "Principal components of patch features",
        f"The first three components of all patches as red, green and blue ({float(shares.sum()):.0%} of the "
        "variance; DINOv2 Fig. 1): similar features have similar colors, in all images. Parts of objects stand out "
        "where the features tell them apart; smooth ramps that are the same in every image show positions.",
        draw_tiles([samples.shown(_SHOWN), Picture("components", maps)]),
    )
