"""Whether bands and bits matter: the same tiles with all bands, with three, and cut to 8-bit RGB.

python -m benchmarks.evaluation.bands photos.tar.gz --runs runs/bands --out docs/results/bands.json

Tiles are mixed from photographs (docs/tools/mix_bands.py), which keeps most of the colors outside B02 to B04. In our
trial 13 bands were still no better. It is no evidence on real satellites.
Each arm is prepared, pretrained by MAE with the same steps, and scored by few-shot on the same held-out tiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

from benchmarks.harness.reports import ROOT, add_out, publish
from mae_vit.data.index import open_index

RGB = ("B04", "B03", "B02")
ARMS = {"13 bands, 16 bits": "all", "3 bands, 16 bits": "three", "RGB cut to 8 bits": "eight"}


def mixing() -> ModuleType:
    """Loads docs/tools/mix_bands.py."""
    spec = importlib.util.spec_from_file_location("mix_bands", ROOT / "docs" / "tools" / "mix_bands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*words: str) -> None:
    """Runs a command of ours in the checkout."""
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def cut_to_eight_bits(tiles: Path, out: Path) -> None:
    """Writes B04, B03, B02 as RGB of 8 bits, by percentiles 1 and 99 of each tile set: what viewers show."""
    import tifffile  # optional

    places = [list(mixing().SATELLITE).index(name) for name in RGB]
    files = sorted(tiles.rglob("*.tif"))
    raw = {path: tifffile.imread(path)[places].astype(np.float64) for path in files}
    values = np.concatenate([image.reshape(3, -1) for image in raw.values()], axis=1)
    low, high = np.percentile(values, (1, 99), axis=1)
    for path, image in raw.items():
        unit = ((image - low[:, None, None]) / (high - low)[:, None, None]).clip(0, 1)
        target = (out / path.relative_to(tiles)).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((unit * 255).round().astype(np.uint8).transpose(1, 2, 0)).save(target)


def prepare(photos: str, runs: Path, *, side: int, per_class: int) -> None:
    """Makes the tiles and the data of each arm; the held-out tiles are the same, because keys are."""
    tiles = runs / "tiles"
    if tiles.exists():
        return
    run("docs/tools/mix_bands.py", photos, str(tiles), "--side", str(side), "--per-class", str(per_class))
    cut_to_eight_bits(tiles, runs / "png")
    command = ("-m", "mae_vit.cli", "prepare")
    run(*command, str(tiles), str(runs / "all"), "--holdout", "0.2")
    run(*command, str(tiles), str(runs / "three"), "--holdout", "0.2", "--bands", ",".join(RGB))
    run(*command, str(runs / "png"), str(runs / "eight"), "--holdout", "0.2")


def score(runs: Path, arm: str, seed: int, arguments: argparse.Namespace) -> float:
    """Pretrains and scores one arm: accuracy on the test tiles, of 0 to 1."""
    folder, data = runs / f"{arm}-{seed}", f"data.path={runs / arm}"
    steps = [f"train.steps={arguments.steps}", f"train.warmup_steps={arguments.steps // 10}"]
    common = [f"run.seed={seed}", "monitor.tensorboard=false", f"model.img_size={arguments.side}"]
    if not (folder / "few" / "results.json").exists():
        config = ["--config", "configs/mae_satellite.yaml", data, f"run.dir={folder / 'mae'}"]
        sizes = [f"model.patch_size={arguments.side // 8}", "train.effective_batch_size=128"]
        length = ["train.epochs=null", "train.warmup_epochs=null", *steps]
        run("pretrain/run.py", *config, *common, *sizes, *length)
        few = ["--ckpt", str(folder / "mae"), "--config", "configs/finetune_cifar_tiny.yaml", data]
        mode = ["finetune.mode=few_shot", "data.augment.policy=none", f"run.dir={folder / 'few'}"]
        run("finetune/run.py", *few, *mode, *common[:2], "train.effective_batch_size=128")
    summary = json.loads((folder / "few" / "summary.json").read_text())
    return float(summary["test_top1"])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", help="labeled photographs: a folder or archive of class folders")
    parser.add_argument(
        "--runs", type=Path, required=True, metavar="DIR", help="tiles, data and runs go here"
    )
    add_out(parser)
    parser.add_argument("--side", type=int, default=32, metavar="PX")
    parser.add_argument("--per-class", type=int, default=500, metavar="N")
    parser.add_argument("--steps", type=int, default=600, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    arguments = parser.parse_args()
    runs = arguments.runs.resolve()
    prepare(arguments.photos, runs, side=arguments.side, per_class=arguments.per_class)
    top1 = {
        name: [score(runs, arm, seed, arguments) for seed in range(arguments.seeds)]
        for name, arm in ARMS.items()
    }
    for name, scores in top1.items():
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(f"{name:<20} {100 * statistics.mean(scores):5.1f} % +- {100 * spread:.1f}, {len(scores)} seeds")
    settings = {key: getattr(arguments, key) for key in ("side", "per_class", "steps", "seeds")}
    prints = {name: open_index(runs / arm, "train").fingerprint for name, arm in ARMS.items()}
    report = {"benchmark": "bands", "settings": settings, "test_top1": top1, "data": prints}
    publish(report, arguments.out)


if __name__ == "__main__":
    main()
