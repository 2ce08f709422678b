"""Whether bands and bits matter: the same tiles with all bands, with three, and cut to 8-bit RGB.

python -m benchmarks.evaluation.bands photos.tar.gz --runs runs/bands --out docs/results/bands.json

Tiles are mixed from photographs (docs/tools/mix_bands.py), which keeps most of the colors outside B02 to B04. In our
trial 13 bands were still no better. It is no evidence on real satellites.
Each arm is prepared, pretrained by MAE with the same steps, and scored by few-shot on the same held-out tiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness.command import ROOT, make_parser, parse, publish, run
from mae_vit.data.index import open_index

SETTINGS = {"side": 32, "per_class": 500, "steps": 600, "seeds": 3}
RGB = ("B04", "B03", "B02")
ARMS = {"13 bands, 16 bits": "all", "3 bands, 16 bits": "three", "RGB cut to 8 bits": "eight"}


def execute(*words: str) -> None:
    """Runs a command of ours in the checkout."""
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def cut_to_eight_bits(tiles: Path, out: Path) -> None:
    """Writes B04, B03, B02 as RGB of 8 bits, by percentiles 1 and 99 of each tile set: what viewers show."""
    import tifffile  # optional

    # docs/tools/mix_bands.py writes B01, B02, ... in their order.
    places = [int(name[1:]) - 1 for name in RGB]
    files = sorted(tiles.rglob("*.tif"))
    raw = {path: tifffile.imread(path)[places].astype(np.float64) for path in files}
    values = np.concatenate([image.reshape(3, -1) for image in raw.values()], axis=1)
    low, high = np.percentile(values, (1, 99), axis=1)
    for path, image in raw.items():
        unit = ((image - low[:, None, None]) / (high - low)[:, None, None]).clip(0, 1)
        target = (out / path.relative_to(tiles)).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((unit * 255).round().astype(np.uint8).transpose(1, 2, 0)).save(target)


def prepare(photos: str, runs: Path) -> None:
    """Makes the tiles and the data of each arm; the held-out tiles are the same, because keys are."""
    tiles = runs / "tiles"
    if tiles.exists():
        return
    sizes = ["--side", str(SETTINGS["side"]), "--per-class", str(SETTINGS["per_class"])]
    execute("docs/tools/mix_bands.py", photos, str(tiles), *sizes)
    cut_to_eight_bits(tiles, runs / "png")
    command = ("-m", "mae_vit.cli", "prepare")
    execute(*command, str(tiles), str(runs / "all"), "--holdout", "0.2")
    execute(*command, str(tiles), str(runs / "three"), "--holdout", "0.2", "--bands", ",".join(RGB))
    execute(*command, str(runs / "png"), str(runs / "eight"), "--holdout", "0.2")


def score(runs: Path, arm: str, seed: int) -> float:
    """Pretrains and scores one arm: accuracy on the test tiles, of 0 to 1."""
    folder, data = runs / f"{arm}-{seed}", f"data.path={runs / arm}"
    side, steps = SETTINGS["side"], SETTINGS["steps"]
    common = [f"run.seed={seed}", "monitor.tensorboard=false", f"model.img_size={side}"]
    if not (folder / "few" / "results.json").exists():
        config = ["--config", "configs/pretrain/mae_satellite.yaml", data, f"run.dir={folder / 'mae'}"]
        sizes = [f"model.patch_size={side // 8}", "train.effective_batch_size=128"]
        length = ["train.epochs=null", f"train.steps={steps}"]
        warmup = ["train.warmup_epochs=null", f"train.warmup_steps={steps // 10}"]
        execute("pretrain/run.py", *config, *common, *sizes, *length, *warmup)
        few = ["--ckpt", str(folder / "mae"), "--config", "configs/finetune/finetune_cifar_tiny.yaml", data]
        mode = ["finetune.mode=few_shot", "data.augment.policy=none", f"run.dir={folder / 'few'}"]
        execute("finetune/run.py", *few, *mode, *common[:2], "train.effective_batch_size=128")
    summary = json.loads((folder / "few" / "summary.json").read_text())
    return float(summary["test_top1"])


def main() -> None:
    """Runs the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("photos", help="labeled photographs: a folder or archive of class folders")
    runs_here = "tiles, data and runs go here"
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help=runs_here)
    arguments = parse(parser)
    runs = arguments.runs.resolve()
    prepare(arguments.photos, runs)
    top1 = {name: [score(runs, arm, seed) for seed in range(SETTINGS["seeds"])] for name, arm in ARMS.items()}
    prints = {name: open_index(runs / arm, "train").fingerprint for name, arm in ARMS.items()}
    report = {"benchmark": "bands", "settings": SETTINGS, "test_top1": top1, "data": prints}
    publish(report, arguments, threads=torch.get_num_threads())


if __name__ == "__main__":
    run(main)
