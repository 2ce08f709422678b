"""A small encoder, small pictures, and outputs as they are read by others."""

import json
from pathlib import Path

import numpy as np
import torch
from helpers import images
from helpers.encoders import info_of
from helpers.images import picture, write_files

from mae_vit.cli.main import main
from mae_vit.models.encoder_file import encoder_bytes

INFO = info_of(embed_dim=24, num_heads=3, mlp_ratio=2.0, pos_embed="learnable")


def write_encoder(path: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    torch.manual_seed(seed)
    encoder = INFO.geometry.build()
    with torch.no_grad():
        encoder.norm.weight.mul_(scale)
    path.write_bytes(encoder_bytes(encoder, INFO))
    return path


def encoded(seed: int, kind: str, size: tuple[int, int] = (24, 20)) -> bytes:
    """A picture, different for each seed; `size` is (width, height)."""
    return images.encoded(picture(seed, size), kind)


def write_folder(folder: Path, *, count: int = 18) -> dict[str, bytes]:
    """SPLIT/CLASS/NUMBER.jpg|png of several sizes; returns bytes by path, in order."""
    files = {}
    for number in range(count):
        kind = ("jpeg", "png")[number % 2]
        split, label = ("train", "train", "test")[number % 3], ("cat", "dog", "owl")[number // 2 % 3]
        name = f"{split}/{label}/{number:04d}.{'jpg' if kind == 'jpeg' else 'png'}"
        files[name] = encoded(number, kind, (16 + number % 7, 16 + number % 5))
    write_files(folder, files)
    return dict(sorted(files.items()))


def call(*arguments: str | Path) -> int:
    """`mae-vit embed` in this process; --workers 0 unless given."""
    words = [str(word) for word in arguments]
    return main(["embed", *words, *([] if "--workers" in words else ["--workers", "0"])])


def done_of(out: Path) -> int:
    """Images that are saved; 0 where there are none."""
    try:
        return json.loads((partial_of(out) / "state.json").read_text())["done"]
    except (FileNotFoundError, ValueError):
        return 0


def partial_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def read_output(folder: Path) -> dict:
    """The files of an output by their names without suffix; lines of text as arrays."""
    columns = {"meta": json.loads((folder / "meta.json").read_text())}
    for path in folder.iterdir():
        if path.suffix == ".npy":
            columns[path.stem] = np.load(path, allow_pickle=False)
        elif path.suffix == ".txt":
            columns[path.stem] = np.array(path.read_text().splitlines())
    return columns


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
