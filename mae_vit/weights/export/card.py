"""The model card: a README.md beside each export, from `card.md.jinja`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from mae_vit.core import __version__
from mae_vit.core.hub import HubName
from mae_vit.core.preprocessing import UNCHANGED
from mae_vit.weights.export.source import ExportSource, Written
from mae_vit.weights.start import name_of

CARD = "README.md"
# Marks a folder as an export of ours.
SIGNATURE = "Exported by mae-vit"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# Pillow's resampling differs from ours; prepared JPEGs, encoded again, add rounding.
_PIXELS_WITHIN, _PIXELS_WITHIN_PREPARED = 2, 6


def write_card(
    folder: Path,
    source: ExportSource,
    written: Written,
    *,
    hub_name: str | None,
    verified: str,
    hub: HubName | None = None,
) -> None:
    """Writes the card: description, use and limits of the model.

    The card's code turns an image file into `images` as `PretrainedEncoder.transform` does, using Pillow or NumPy.
    `hub_name` is the name of the format's library on the Hub, None if it has none.
    """
    info, bands = source.info, source.info.bands
    tags = ["vision-transformer", "image-feature-extraction"]
    card = ModelCard.from_template(
        ModelCardData(library_name=hub_name, tags=tags),
        template_path=str(_TEMPLATE),
        source=source,
        info=info,
        bands=bands,
        name=name_of(source.asked),
        description=describe(source),
        written=written,
        hub=hub,
        height=info.img_size[0],
        width=info.img_size[1],
        mean=_rounded(info.mean),
        std=_rounded(info.std),
        low=_rounded(bands.low),
        high=_rounded(bands.high),
        within=_PIXELS_WITHIN if info.preprocessing == UNCHANGED else _PIXELS_WITHIN_PREPARED,
        verified=verified,
        signature=f"{SIGNATURE} {__version__}",
    )
    card.save(folder / CARD)


def describe(source: ExportSource) -> str:
    """Describes the network in one line."""
    info, network, vit = source.info, source.network, source.info.vit
    parameters = sum(parameter.numel() for parameter in network.parameters())
    cls = "[CLS]" if vit.class_tokens == 1 else f"mean of {vit.class_tokens} class tokens"
    pooling = cls if source.encoder.pool == "cls" else "mean of the patches"
    size = vit.embed_dim if network.head is None else network.head.out_features
    return (
        f"Vision Transformer, {vit.depth} blocks of width {vit.embed_dim}, {vit.num_heads} heads, "
        f"{info.img_size[0]} x {info.img_size[1]} px in patches of {vit.patch_size}, "
        f"{parameters / 1e6:.3g} M parameters; {network.output_name} (B, {size}) from {pooling}"
    )


def _rounded(values: Sequence[float]) -> list[float]:
    """Rounds values for the card, precise enough for float32."""
    return [float(f"{value:.7g}") for value in values]
