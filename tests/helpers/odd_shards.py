"""Shards that others write, and what `prepare` makes of them."""

from collections.abc import Callable
from pathlib import Path

from helpers.images import encoded, picture, read_back

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset

IMAGES = [encoded(picture(n, (8, 8))) for n in range(6)]
Members = list[tuple[str, bytes]]


def members(
    image: str = "jpg", label: str = "cls", of: Callable[[int], bytes] = lambda n: b"%d" % (n % 3)
) -> Members:
    return [(f"{n}.{field}", data) for n in range(6) for field, data in ((image, IMAGES[n]), (label, of(n)))]


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments), "--workers", "0"])


def labels(out: Path, split: str = "train") -> dict[str, str]:
    """The class of each key."""
    classes = read_dataset(out).classes
    return {key: classes[int(s["cls"])] for key, s in read_back(out, split).items() if "cls" in s}


NUMBERS = {str(n): str(n % 3) for n in range(6)}
PLAIN = members()
