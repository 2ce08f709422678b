"""The views of an encoder: each has a picture, a text and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.image_rows import draw_rows
from mae_vit.inspection import drawing as figures
from mae_vit.inspection.attention import (
    attention_maps,
    attention_weights,
    head_entropy,
    mean_attention_distance,
    rollout,
)
from mae_vit.inspection.band_views import band_views, in_bands
from mae_vit.inspection.drawing import Table, View, image_tile, map_tile, overlay_tile, rows_of_tiles
from mae_vit.inspection.features import FEWEST_SCORED, layer_features, nearest_images, probe_by_layer, project
from mae_vit.inspection.images import Samples
from mae_vit.inspection.parameters import center_patch, filter_components, position_similarity
from mae_vit.inspection.reconstructions import reconstruct
from mae_vit.inspection.subject import InspectedEncoder
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.sizes import Pool
from mae_vit.weights.encoder import PretrainedEncoder


class InspectableEncoder(Protocol):
    """An encoder to inspect: `PretrainedEncoder`, or an encoder in training (`InTraining`)."""

    @property
    def encoder(self) -> Encoder:
        """Returns the encoder."""

    @property
    def pool(self) -> Pool:
        """Returns how features are pooled."""

    def normalize(self, images: Tensor) -> Tensor:
        """Maps uint8 (B, C, H, W) to what the encoder takes."""


_SHOWN = 8
_NEIGHBORS = 8
# Images that are averaged over; the paper takes 128 (App. D.7).
_AVERAGED = 128
_MEASURED = 256
_FEWEST_PROJECTED = 10
# Views that need more images or labels, by name: their titles, and the condition.
CONDITIONAL = {
    "neighbors": ("Nearest neighbors", "takes two images or more"),
    "projection": ("Features in the plane", f"takes {_FEWEST_PROJECTED} images or more"),
    "probe-by-block": (
        "What each block knows of the classes",
        f"takes labels of two classes or more, and {FEWEST_SCORED} images to score beside those it is fitted on",
    ),
}


def all_views(subject: InspectedEncoder, samples: Samples) -> Iterator[View]:
    """Yields all views; the later ones take longer."""
    yield from band_views(subject.objective, samples)
    yield from reconstruction_views(subject, samples)
    yield from attention_views(subject.model, samples)
    yield from parameter_views(subject.model.encoder)
    yield from feature_views(subject.model, samples)


def reconstruction_views(subject: InspectedEncoder, samples: Samples) -> Iterator[View]:
    """Draws the objective's predictions of masked patches; nothing without an objective."""
    if subject.objective is None:
        return
    batch = samples.batch(_MEASURED).to(subject.objective.mean.device)
    reconstructions = reconstruct(subject.objective, batch, shown=_SHOWN)
    names = list(dict.fromkeys(name for one in reconstructions for name in one.metrics))
    table: Table = (
        ["mask", "ratio", *names],
        [[one.kind, one.ratio, *(one.metrics.get(name) for name in names)] for one in reconstructions],
    )
    for kind in dict.fromkeys(one.kind for one in reconstructions):
        several = [in_bands(one, samples) for one in reconstructions if one.kind == kind]
        rows = [
            row._replace(label=f"{row.label}, {one.ratio:.0%} hidden{_describe_metrics(one.metrics)}")
            for one in several
            for row in one.rows[:-1]
        ]
        name = kind.replace(" ", "-")
        yield View(
            f"reconstructions-{name}",
            f"Reconstructions, masks {kind}" if kind == "as trained" else f"Reconstructions, {kind} masks",
            "What the hidden patches were predicted to be: masked, predicted, pasted into the visible part, and the "
            "original last. Where a row says true patch mean and std, the prediction is of normalized pixels and "
            "borrows both from the hidden patch: shapes and edges are the network's, brightness is not.",
            draw_rows([*rows, several[0].rows[-1]]),
            table,
        )


def _describe_metrics(metrics: dict[str, float]) -> str:
    if "psnr_db" not in metrics:
        return ""
    return f": {metrics['psnr_db']:.2f} dB, {metrics['psnr_gain_db']:+.2f} over its baseline"


def attention_views(model: InspectableEncoder, samples: Samples) -> Iterator[View]:
    """Maps by head, rollout, and how far and how widely heads look."""
    shown, depth = samples.shown(_SHOWN), len(model.encoder.blocks)
    weights = _weights_of(model, samples.images[:_SHOWN])
    for block in sorted({0, depth // 2, depth - 1}):
        yield block_view(model, shown, weights[block], block)
    yield rollout_view(model, shown, weights)
    distances, entropies = head_statistics(model, samples.images[:_AVERAGED])
    yield distance_view(model, distances, entropies)
    yield entropy_view(model, distances, entropies)


def block_view(model: InspectableEncoder, images: Tensor, weights: Tensor, block: int) -> View:
    """Where each head of a block looks: a line for each of images uint8 (B, C, H, W), weights (B, H, T, T)."""
    maps = attention_maps(weights, model.encoder.grid_size, query=model.pool).cpu().numpy()
    return View(
        f"attention-block-{block + 1:02d}",
        f"Attention in block {block + 1} of {len(model.encoder.blocks)}",
        f"Each image, then a map for each head: where {_who(model)} looks (brightest: most, by its own scale).",
        rows_of_tiles(
            [
                [image_tile(image), *map(map_tile, heads)]
                for image, heads in zip(images.numpy(), maps, strict=True)
            ],
            ["image", *(f"head {head + 1}" for head in range(maps.shape[1]))],
        ),
        arrays={"maps": maps},
    )


def rollout_view(model: InspectableEncoder, images: Tensor, weights: Sequence[Tensor]) -> View:
    """Attention through all blocks, of images uint8 (B, C, H, W)."""
    joint = rollout(weights)
    rolled = attention_maps(joint[:, None], model.encoder.grid_size, query=model.pool)[:, 0].cpu().numpy()
    return View(
        "attention-rollout",
        "Attention rollout",
        f"Attention followed through all blocks to the pixels, from {_who(model)}: what is bright reaches the read-out "
        "(Abnar & Zuidema 2020; ViT Fig. 6).",
        rows_of_tiles(
            [
                [image_tile(image), map_tile(values), overlay_tile(image, values)]
                for image, values in zip(images.cpu().numpy(), rolled, strict=True)
            ],
            ["image", "rollout", "both"],
        ),
        arrays={"rollout": rolled},
    )


def distance_view(model: InspectableEncoder, distances: np.ndarray, entropies: np.ndarray) -> View:
    """How far each head looks, from `head_statistics`."""
    encoder = model.encoder
    same = torch.ones(1, 1, encoder.num_patches, encoder.num_patches)
    alike = mean_attention_distance(same, encoder.grid_size, encoder.patch_size).item()
    return View(
        "attention-distance",
        "Mean attention distance",
        "How many pixels away each head looks, on average (ViT Fig. 7 right): a point for each head. Trained "
        "encoders have local and global heads in early blocks and global ones later; at random all are alike.",
        figures.by_depth(
            distances, "mean attention distance, px", alike=alike, alike_label="all patches alike"
        ),
        _of_heads(distances, entropies),
        {"distance_px": distances},
    )


def entropy_view(model: InspectableEncoder, distances: np.ndarray, entropies: np.ndarray) -> View:
    """How widely each head looks, from `head_statistics`."""
    tokens = model.encoder.num_prefix_tokens + model.encoder.num_patches
    return View(
        "attention-entropy",
        "Entropy of attention",
        "How widely each head looks: low is a few tokens, the dashed line all alike.",
        figures.by_depth(
            entropies, "entropy, nats", alike=float(np.log(tokens)), alike_label=f"all {tokens} tokens alike"
        ),
        _of_heads(distances, entropies),
        {"entropy_nats": entropies},
    )


def _of_heads(distances: np.ndarray, entropies: np.ndarray) -> Table:
    rows: list[list[object]] = [
        [block + 1, head + 1, float(distances[block, head]), float(entropies[block, head])]
        for block in range(distances.shape[0])
        for head in range(distances.shape[1])
    ]
    return ["block", "head", "mean_attention_distance_px", "entropy_nats"], rows


def _weights_of(model: InspectableEncoder, images: Tensor) -> list[Tensor]:
    return attention_weights(model.encoder, model.normalize(images.to(model.encoder.cls_token.device)))


def _who(model: InspectableEncoder) -> str:
    if model.pool == "mean":
        return "the mean over all patches"
    return "[CLS]" if model.encoder.num_prefix_tokens == 1 else "the mean over all class tokens"


def head_statistics(model: InspectableEncoder, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean attention distance in pixels and entropy in nats, each (L, H), over uint8 images (n, C, H, W)."""
    encoder = model.encoder
    sums: list[np.ndarray] = [np.zeros(0), np.zeros(0)]
    for start in range(0, len(images), _SHOWN):
        part = images[start : start + _SHOWN]
        weights = _weights_of(model, part)
        part_sums = (
            [mean_attention_distance(block, encoder.grid_size, encoder.patch_size) for block in weights],
            [head_entropy(block) for block in weights],
        )
        for place, values in enumerate(part_sums):
            total = torch.stack(values).double().cpu().numpy() * len(part)
            sums[place] = total if start == 0 else sums[place] + total
    return sums[0] / len(images), sums[1] / len(images)


def parameter_views(encoder: Encoder) -> Iterator[View]:
    """Draws the encoder's parameters: positions and filters."""
    similarity = position_similarity(encoder.pos_embed, encoder.num_prefix_tokens).cpu().numpy()
    grid, center = encoder.grid_size, center_patch(encoder.grid_size)
    fixed = "The table is fixed (sin-cos): this is what it was given, not what it has learned." * (
        not encoder.pos_embed.requires_grad
    )
    yield View(
        "positions",
        "Similarity of position embeddings",
        "For each patch, how alike its position embedding is to all others' (ViT Fig. 7 center): a bright spot "
        "at the patch's own place, with its row and column, means that the grid was learned. " + fixed,
        figures.similarity_grid(similarity, grid),
        arrays={"similarity": similarity},
    )
    yield View(
        "position-center",
        "Similarity to the central position",
        f"The same for the patch in row {center // grid[1]}, column {center % grid[1]} alone. {fixed}",
        figures.one_map(
            similarity[center].reshape(grid), "cosine similarity", (center // grid[1], center % grid[1])
        ),
        arrays={"similarity": similarity[center].reshape(grid)},
    )
    components, shares = filter_components(encoder.patch_embed.proj.weight)
    yield View(
        "filters",
        "Principal components of the patch projection",
        f"The first {len(components)} (ViT Fig. 7 left; the table has what each explains of the filters' variance): "
        "smooth, wave-like ones are a basis for what patches look like; noise means that little was learned.",
        _filter_tiles(components),
        (["component", "explained_share"], [[place + 1, float(share)] for place, share in enumerate(shares)]),
        {"components": components.numpy()},
    )


def _filter_tiles(components: Tensor) -> np.ndarray:
    """Draws filters in gray or color; of other bands a line for each, with a tile for each band."""
    channels = components.shape[1]
    if channels in (1, 3):
        return rows_of_tiles(_in_rows([image_tile(_stretched(one)) for one in components], 7))
    drawn = [_stretched(one) for one in components]
    return rows_of_tiles(
        [[image_tile(one[band : band + 1]) for band in range(channels)] for one in drawn],
        [f"band {band + 1}" for band in range(channels)],
    )


def feature_views(model: PretrainedEncoder, samples: Samples) -> Iterator[View]:
    """Draws neighbors, a map of the features, and each block's accuracy."""
    by_layer = layer_features(model, samples)
    last, names = by_layer[-1], samples.classes
    if len(samples) > 1:
        places, similarity = nearest_images(last, min(_SHOWN, len(samples)), _NEIGHBORS)
        images = samples.shown().numpy()
        yield View(
            "neighbors",
            CONDITIONAL["neighbors"][0],
            "Each image, then those whose features are most like its own (cosine).",
            rows_of_tiles(
                [
                    [image_tile(images[query]), *(image_tile(images[place]) for place in row.tolist())]
                    for query, row in enumerate(places)
                ],
                ["image", "most alike", *(f"{place + 1}." for place in range(1, places.shape[1]))],
            ),
            (
                ["image", "class", "neighbor", "neighbor_class", "cosine"],
                [
                    [
                        samples.keys[query],
                        _class(samples.labels[query], names),
                        samples.keys[place],
                        _class(samples.labels[place], names),
                        float(value),
                    ]
                    for query in range(len(places))
                    for place, value in zip(places[query].tolist(), similarity[query], strict=True)
                ],
            ),
        )
    labels = samples.labels.numpy()
    if len(samples) >= _FEWEST_PROJECTED:
        points = project(last)
        yield View(
            "projection",
            CONDITIONAL["projection"][0],
            "t-SNE of the read-out: near points have like features"
            + ("; colors are classes, which it was not told." if (labels >= 0).any() else "."),
            figures.scatter(points, labels, names),
            (
                ["image", "x", "y", "class"],
                [
                    [key, float(x), float(y), _class(label, names)]
                    for key, (x, y), label in zip(samples.keys, points, samples.labels, strict=True)
                ],
            ),
        )
    scores, most_frequent = probe_by_layer(by_layer, samples.labels, num_classes=len(names))
    if scores:
        yield View(
            "probe-by-block",
            CONDITIONAL["probe-by-block"][0],
            "Top-1 of a linear read-out of each block's features, fitted in closed form on some of these images "
            "and scored on the rest.",
            figures.curve(scores, "top-1, %", most_frequent=most_frequent),
            (["block", "top1"], [[block + 1, score] for block, score in enumerate(scores)]),
        )


def _class(label: Tensor, names: Sequence[str]) -> str:
    number = int(label)
    return names[number] if 0 <= number < len(names) else ""


def _stretched(component: Tensor) -> np.ndarray:
    """A filter as an image: gray is zero, the largest value of either sign at an end of the range."""
    scale = component.abs().max().clamp(min=torch.finfo(component.dtype).tiny)
    return ((component / scale * 0.5 + 0.5) * 255).round().byte().numpy()


def _in_rows(tiles: Sequence[np.ndarray], columns: int) -> list[Sequence[np.ndarray]]:
    return [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
