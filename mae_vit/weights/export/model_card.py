"""The model card: a README.md beside each export."""

from __future__ import annotations

from collections.abc import Sequence

from mae_vit.core import __version__
from mae_vit.core.bands import Bands
from mae_vit.core.hub import HubName
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.weights.export.history import Facts
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.verify import TOLERANCE, Verification

CARD = "README.md"
# By which an export knows another.
SIGNATURE = "Exported by mae-vit"
_HUB_LIBRARIES = {"timm": "timm", "hf": "transformers", "onnx": "onnx"}


def card(
    handed: ExportSource, target: str, verified: Verification, facts: Facts, hub: HubName | None = None
) -> str:
    """Writes what the model is, how it was made, how it is used, and what it cannot do.

    Args:
        handed: what was exported.
        target: name of the form.
        verified: what it was found to be.
        facts: what is known of its history.
        hub: the repository that it is pushed to.

    Returns:
        Markdown, with the front matter of model hubs.
    """
    parts = [
        _front_matter(target),
        f"# {facts.name}\n\n{_introduction(handed, facts)}",
        # Not in it: an export replaces only a folder that holds nothing else.
        "## Use\n\nIn this folder, with an image beside the folder:\n\n"
        f"```python\n{images_code(handed)}\n{verified.code}```",
        _load_line(handed, hub) if hub else "",
        _notes(verified),
        f"## History\n\n{_table(facts.history)}",
        f"## Results\n\n{_table(facts.results) if facts.results else 'None are recorded beside the weights.'}",
        f"## Limits\n\n{_bullets(facts.limits)}",
        "## License\n\nTo be stated by whoever publishes these weights; the terms of the training data may bind them.",
        f"{SIGNATURE} {__version__}; with {verified.by}, {verified.what} of random images differ by at most "
        f"{verified.difference:.2g} from the source's ({TOLERANCE:g} allowed).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def images_code(handed: ExportSource) -> str:
    """Python that makes `images` of a file as `PretrainedEncoder.transform` does, by Pillow alone, or by NumPy."""
    info = handed.encoder.info
    height, width = info.img_size
    if info.bands is not None:
        return _bands_code(info, info.bands)
    mean, std = ([float(f"{value:.7g}") for value in values] for values in (info.mean, info.std))
    within = 2 if info.preprocessing == UNCHANGED else 6  # JPEG's own rounding
    return f"""# By Pillow: as mae_vit.load_encoder(...).transform, pixels within {within} of 255 of it on photographs.
import numpy as np
import torch
from PIL import Image

image = Image.open("../image.jpg")
{_turn(info.preprocessing)}if image.mode.startswith("I"):  # 16 bits: Pillow would clip them at 255
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
image = image.convert("{"L" if info.in_chans == 1 else "RGB"}")
{_shrink(info.preprocessing)}scale = min(image.width / {width}, image.height / {height})
box_width, box_height = round(scale * {width}), round(scale * {height})
left, top = (image.width - box_width) // 2, (image.height - box_height) // 2
image = image.crop((left, top, left + box_width, top + box_height))
image = image.resize(({width}, {height}), Image.Resampling.BICUBIC)  # width, height
pixels = torch.from_numpy(np.array(image)).float().reshape(1, {height}, {width}, {info.in_chans}).movedim(3, 1) / 255
mean, std = (torch.tensor(values)[:, None, None] for values in ({mean}, {std}))
images = (pixels - mean) / std  # float32 (B, {info.in_chans}, {height}, {width})
"""


def _turn(how: Preprocessing) -> str:
    """Python that turns an image upright, if the images of the training were."""
    if how.exif_orientation == "ignore":
        return ""
    return "from PIL import ImageOps\n\nimage = ImageOps.exif_transpose(image)  # as the images of its training\n"


def _shrink(how: Preprocessing) -> str:
    """Python that makes an image smaller, if the images of the training were."""
    if how.resize is None:
        return ""
    return f"""if min(image.size) > {how.resize}:  # as the images of its training
    import io

    smaller, stored = {how.resize} / min(image.size), io.BytesIO()
    size = (round(image.width * smaller), round(image.height * smaller))
    image.resize(size, Image.Resampling.BICUBIC).save(stored, "jpeg", quality={how.quality})
    image = Image.open(stored).convert(image.mode)
"""


def _bands_code(info: EncoderInfo, bands: Bands) -> str:
    """Python for images of bands: raw values in, with the scale, the mean and the std of the training data."""
    height, width = info.img_size
    facts = [[float(f"{value:.7g}") for value in row] for row in (bands.low, bands.high, info.mean, info.std)]
    missing = "" if bands.nodata is None else f" | (pixels == {bands.nodata:g})"
    names = ", ".join(bands.names)
    done = info.preprocessing.describe(in_bands=True)
    before = f"# This must have been done: {done}\n" if done else ""
    return f"""# Raw values, {bands.dtype} ({len(bands.names)}, height, width), of the bands {names}.
{before}import numpy as np
import torch

image = np.load("../image.npy")
assert image.dtype == "{bands.dtype}" and len(image) == {len(bands.names)}
scale = min(image.shape[1] / {height}, image.shape[2] / {width})
box_height, box_width = round(scale * {height}), round(scale * {width})
top, left = (image.shape[1] - box_height) // 2, (image.shape[2] - box_width) // 2
pixels = torch.from_numpy(image[:, top : top + box_height, left : left + box_width].astype("float32"))[None]
missing = pixels.isnan(){missing}
low, high, mean, std = (torch.tensor(values)[:, None, None] for values in ({", ".join(map(str, facts))}))
images = (((pixels - low) / (high - low) - mean) / std).masked_fill(missing, 0)  # missing values: the mean
if images.shape[2:] != ({height}, {width}):
    images = torch.nn.functional.interpolate(images, ({height}, {width}), mode="bicubic", antialias=True)
# images: float32 (B, {len(bands.names)}, {height}, {width})
"""


def describe(handed: ExportSource) -> str:
    """The network in one line."""
    info, network = handed.encoder.info, handed.network
    parameters = sum(parameter.numel() for parameter in network.parameters())
    cls = "[CLS]" if info.vit.class_tokens == 1 else f"mean of {info.vit.class_tokens} class tokens"
    read = cls if handed.encoder.pool == "cls" else "mean of the patches"
    return (
        f"Vision Transformer, {info.vit.depth} blocks of width {info.vit.embed_dim}, {info.vit.num_heads} heads, "
        f"{info.img_size[0]} x {info.img_size[1]} px in patches of {info.vit.patch_size}, "
        f"{parameters / 1e6:.3g} M parameters; {network.output_name} (B, {network.output_size}) from {read}"
    )


def _introduction(handed: ExportSource, facts: Facts) -> str:
    info = handed.encoder.info
    mean, std = ([float(f"{value:.4g}") for value in values] for values in (info.mean, info.std))
    images = f"Images are float32 (B, {info.in_chans}, {info.img_size[0]}, {info.img_size[1]})"
    normalized = f"pixels in 0..1, then normalized by mean {mean} and standard deviation {std}."
    if info.bands is not None:
        normalized = f"the bands of this table, normalized. {_band_table(info, info.bands)}"
    lines = [f"{describe(handed)}. Objective: {facts.objective}.", f"{images}: {normalized}"]
    if before := info.preprocessing.describe(in_bands=info.bands is not None):
        lines.append(f"The images of its training were prepared, and others must be: {before}")
    if handed.classes:
        shown = ", ".join(handed.classes[:20])
        lines.append(
            f"Classes: {shown}{', ...' if len(handed.classes) > 20 else ''} ({len(handed.classes)})."
        )
    return "\n\n".join(lines)


def _band_table(info: EncoderInfo, bands: Bands) -> str:
    """Says what raw values mean, band by band."""
    marks = [] if bands.nodata is None else [f"{bands.nodata:g}"]
    marks += ["NaN"] if bands.dtype.startswith("float") else []
    missing = f" Missing values ({' or '.join(marks)}) become 0 after the normalization." if marks else ""
    rows = [
        f"| {name} | {low:g} | {high:g} | {mean:.4g} | {std:.4g} |"
        for name, low, high, mean, std in zip(
            bands.names, bands.low, bands.high, info.mean, info.std, strict=True
        )
    ]
    return (
        f"Raw values are {bands.dtype}. Of each band, `low` becomes 0 and `high` becomes 1; values beyond stay beyond. "
        f"Then the mean is subtracted, and the rest divided by the standard deviation.{missing}\n\n"
        "| band | low | high | mean | std |\n| --- | --- | --- | --- | --- |\n" + "\n".join(rows)
    )


def _front_matter(target: str) -> str:
    library = f"library_name: {_HUB_LIBRARIES[target]}\n" if target in _HUB_LIBRARIES else ""
    return f"---\n# license: to be stated\n{library}tags: [vision-transformer, image-feature-extraction]\n---"


def _load_line(handed: ExportSource, hub: HubName) -> str:
    return f'With mae-vit: `mae_vit.load_encoder("{hub}")`.'


def _notes(verified: Verification) -> str:
    return _bullets([f"{note[0].upper()}{note[1:]}." for note in verified.notes])


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)])
