"""Golden runs: 20 steps in float32, whose losses and files no refactoring changes.

python tests/golden/record.py            # prints what the runs give here
python tests/golden/record.py --record   # writes tests/golden/golden.json: before a refactoring, on a clean commit
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mae_vit.runtime.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("golden.json")
SHORT = [
    *("train.epochs=null", "train.steps=20", "train.warmup_epochs=null", "train.warmup_steps=4"),
    *("train.precision=fp32", "run.seed=0", "monitor.log_every_steps=1", "monitor.tensorboard=false"),
]
ENGINES = {"torch": ["train.engine=torch"], "deepspeed on two ranks": ["train.engine=deepspeed"]}


def machine() -> str:
    """What decides on the last bits: processor, cores (one process uses them all as threads) and libraries."""
    import torch

    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    kernels = torch.backends.cpu.get_cpu_capability()
    cores = len(os.sched_getaffinity(0))
    processor = f"{platform.machine()}, {models[0].split(':')[1].strip()}, {cores} cores, {kernels}"
    return f"{processor}, torch {torch.__version__}"


def start(engine: str, script: str, arguments: list[str]) -> None:
    """Runs a script to its end, on one process or two."""
    words = [script, *arguments, *ENGINES[engine]]
    if engine != "torch":
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        words = [launcher, "--num_accelerators", "2", "--master_port", str(free_port()), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def what_is_left(folder: Path) -> dict:
    """Losses of a run, and digests of its weights and of its last checkpoint's tensors."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max((folder / "checkpoints").glob("step-*"))
    files = [*folder.glob("*.safetensors"), *last.glob("*.safetensors")]
    return {
        "losses": [line["loss"] for line in lines if line.get("loss") is not None],
        "files": {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(files)
        },
    }


# Pretraining: config, data, and what makes it fit them.
SMALL = ["model.img_size=8", "model.patch_size=2", "model.in_chans=1", "data.augment.flip=false"]
PRETRAINING = {
    "mae_digits": ("mae_digits", "digits", []),
    "masked_patch_digits": ("masked_patch_digits", "digits", []),
    "joint": ("joint_cifar_tiny", "digits", [*SMALL, "train.effective_batch_size=128"]),
    "contrastive": ("contrastive_mae_scratch_cifar_tiny", "digits", [*SMALL, "data.augment.policy=null"]),
    "bands": ("mae_satellite", "tiles", ["train.effective_batch_size=32"]),
}
FINETUNE = "finetune"  # from the first


def write_tiles(folder: Path) -> None:
    """Writes 64 smooth tiles of four bands of 16 bits, of uneven sizes, as GeoTIFF has them."""
    import numpy as np
    import tifffile
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(64):
        size = (72 + number % 5, 70 + number % 3)
        bands = [
            np.asarray(
                Image.fromarray(rng.random((6, 5), dtype=np.float32)).resize(size, Image.Resampling.BICUBIC)
            )
            for _ in range(4)
        ]
        path = folder / f"tile-{number:02d}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (np.clip(bands, 0, 1) * 12_000).astype(np.uint16)
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="separate")


def golden_runs(
    folder: Path, *, names: Sequence[str] = (*PRETRAINING, FINETUNE), engines: Sequence[str] = tuple(ENGINES)
) -> dict[str, dict]:
    """Pretrains under each objective, on bands too, and fine-tunes, on each engine, on what `prepare` writes.

    Files name the fingerprint of their data, so it must be the same command's.
    """
    runs = {}
    write_tiles(folder / "tif")
    for what, name in (("digits", "digits"), (str(folder / "tif"), "tiles")):
        prepare = [sys.executable, "-m", "mae_vit.cli", "prepare", what, str(folder / name)]
        subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    for engine in engines:
        short = engine.split()[0]
        for name in names:
            run = folder / f"{name}-{short}"
            if name == FINETUNE:
                words = [
                    *("--ckpt", str(folder / f"mae_digits-{short}")),
                    *("--config", "configs/finetune/finetune_cifar_tiny.yaml"),
                    *("model.img_size=8", "finetune.holdout=0", "train.effective_batch_size=64"),
                    *("data.augment.crop=pad", f"data.path={folder / 'digits'}"),
                ]
                start(engine, "finetune/run.py", [*words, f"run.dir={run}", *SHORT])
            else:
                config, data, more = PRETRAINING[name]
                words = ["--config", f"configs/{config}.yaml", f"data.path={folder / data}", f"run.dir={run}"]
                start(engine, "pretrain/run.py", [*words, *more, *SHORT])
            runs[f"{name}, {engine}"] = what_is_left(run)
    return runs


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        record = {"machine": machine(), "runs": golden_runs(Path(temporary))}
    text = json.dumps(record, indent=1) + "\n"
    if "--record" in sys.argv:
        RECORD.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
