"""Every config in configs/ passes --dry-run, on small images that stand in for its data."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.data.prepare import prepare
from mae_vit.data.sources import open_source
from pretrain.job import main

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.xdist_group("configs")  # they share their images
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def colored(tmp_path_factory) -> Path:
    """scikit-learn's digits at 32 px in three colors: enough for a batch of 4096."""
    folder, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("colored")
    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        large = np.kron(image * 15, np.ones((4, 4))).astype(np.uint8)
        for color in range(3):
            pixels = np.zeros((32, 32, 3), np.uint8)
            pixels[..., color] = large
            target = folder / ("val" if number % 10 == 0 else "train") / str(label)
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(target / f"{number}-{color}.png", compress_level=0)
    prepare([open_source(str(folder), out=out, split="train", root=None)], out)
    return out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run(path, colored, digits, tmp_path, capsys):
    data = digits if "digits" in path.stem else colored
    assert main(["--config", str(path), "--dry-run", f"data.path={data}", f"run.dir={tmp_path / 'run'}"]) == 0
    plan = capsys.readouterr().out
    assert "GFLOP per image" in plan
    assert not (tmp_path / "run").exists()


def test_all_are_here():
    assert len(CONFIGS) >= 14
