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
from pathlib import Path

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
    words = [sys.executable, script, *arguments, *ENGINES[engine]]
    if engine != "torch":
        launcher = str(Path(sys.executable).parent / "deepspeed")
        words = [
            sys.executable,
            launcher,
            "--num_accelerators",
            "2",
            "--master_port",
            free_port(),
            *words[1:],
        ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> str:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


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


def golden_runs(folder: Path) -> dict[str, dict]:
    """Pretrains under both objectives and fine-tunes, on each engine, on the digits that `prepare` writes.

    Files name the fingerprint of their data, so it must be the same command's.
    """
    data, runs = folder / "data", {}
    prepare = [sys.executable, "-m", "mae_vit.cli", "prepare", "digits", str(data)]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    for engine in ENGINES:
        for name in ("mae_digits", "masked_patch_digits"):
            run = folder / f"{name}-{engine.split()[0]}"
            config = ["--config", f"configs/{name}.yaml", f"data.path={data}", f"run.dir={run}"]
            start(engine, "pretrain/run.py", [*config, *SHORT])
            runs[f"{name}, {engine}"] = what_is_left(run)
        run, weights = folder / f"finetune-{engine.split()[0]}", folder / f"mae_digits-{engine.split()[0]}"
        config = ["--config", "configs/finetune_cifar_tiny.yaml", "model.img_size=8", "finetune.holdout=0"]
        few = [
            f"data.path={data}",
            f"run.dir={run}",
            "train.effective_batch_size=64",
            "data.augment.crop=pad",
        ]
        start(engine, "finetune/run.py", ["--ckpt", str(weights), *config, *few, *SHORT])
        runs[f"finetune, {engine}"] = what_is_left(run)
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
