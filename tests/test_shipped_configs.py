"""Every config in configs/ passes --dry-run, on small images that stand in for its data."""

from pathlib import Path

import pytest

from finetune.job import main as finetune
from pretrain.job import main as pretrain

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.xdist_group("configs")  # they share their images
# A comparison checks its configs in tests/test_config.py.
CONFIGS = sorted(
    path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith(("compare_", "study_"))
)


def is_finetuning(path: Path) -> bool:
    return "\nfinetune:" in path.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run(path, colored, digits, tmp_path, capsys):
    data = digits if "digits" in path.stem else colored
    main = finetune if is_finetuning(path) else pretrain
    assert main(["--config", str(path), "--dry-run", f"data.path={data}", f"run.dir={tmp_path / 'run'}"]) == 0
    plan = capsys.readouterr().out
    assert "GFLOP per image" in plan
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["finetune_cifar_tiny", "finetune_base"])
def test_dry_run_from_a_start(name, colored, tmp_path, capsys):
    """The parts of a config that hold with a start alone are valid too."""
    import torch

    from mae_vit.encoder import SIZES
    from mae_vit.weights import EncoderInfo, encoder_bytes

    size = SIZES["tiny-cifar"]
    info = EncoderInfo(
        "tiny-cifar", (32, 32), 4, 3, 128, size.depth, 4, 4.0, "sincos", [0.5] * 3, [0.2] * 3, "mae", 9
    )
    torch.manual_seed(0)
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(info.build(), info))
    arguments = ["--config", str(ROOT / f"configs/{name}.yaml"), "--dry-run", "--ckpt", str(tmp_path)]
    assert finetune([*arguments, f"data.path={colored}", f"run.dir={tmp_path / 'run'}"]) == 0
    plan = capsys.readouterr().out
    # The size of images is the config's: positions are interpolated to it.
    assert f"tiny-cifar, {32 if name == 'finetune_cifar_tiny' else 224}x" in plan
    assert "100.0% of the encoder's parameters" in plan
    share = {"finetune_cifar_tiny": 0.8, "finetune_base": 0.65}[name]
    assert f"embeddings      {share ** (size.depth + 1):.4f}" in plan


def test_all_are_here():
    assert len(CONFIGS) >= 18
