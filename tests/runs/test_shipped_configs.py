"""Every config in configs/ passes --dry-run, on small images that stand in for its data."""

import re
from pathlib import Path

import pytest
from helpers.ample_machine import ample_machine  # noqa: F401 (a fixture)
from helpers.commands import ROOT
from helpers.encoders import encoder_file
from helpers.images import prepare_pairs, write_pairs

from mae_vit.finetuning.command import main as finetune
from mae_vit.models.sizes import SIZES
from mae_vit.pretraining.command import main as pretrain

# A comparison checks its configs in tests/unit/config/test_shipped.py.
# A batch larger than all of the images here.
SMALLER = {"linear_probe_base": ["train.effective_batch_size=4096"]}
CONFIGS = sorted(
    path for kind in ("pretrain", "finetune") for path in (ROOT / "configs" / kind).glob("*.yaml")
)
DEPTH = SIZES["tiny-cifar"].depth


def is_finetuning(path: Path) -> bool:
    return "\nfinetune:" in path.read_text()


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    prepare_pairs(write_pairs(folder / "in", side=32), folder / "out")
    return folder / "out"


def cases() -> list:
    """The largest networks are slow to build, and their base sizes have the same parts."""
    large = ("_large", "_huge")
    return [
        pytest.param(path, marks=[pytest.mark.slow] if path.stem.endswith(large) else [], id=path.stem)
        for path in CONFIGS
    ]


@pytest.mark.parametrize("path", cases())
def test_dry_run(path, colored, digits, masked, tmp_path, capsys):
    data = masked if "segment" in path.stem else digits if "digits" in path.stem else colored
    main = finetune if is_finetuning(path) else pretrain
    options = [f"data.path={data}", f"run.dir={tmp_path / 'run'}", *SMALLER.get(path.stem, [])]
    assert main(["--config", str(path), "--dry-run", *options]) == 0
    plan = capsys.readouterr().out
    assert "GFLOP per image" in plan
    assert not (tmp_path / "run").exists()


@pytest.fixture
def plan_from_weights(colored, tmp_path, capsys):
    """The plan of a config with pretrained weights, with the parts of it that hold with these alone."""

    def call(name: str) -> str:
        encoder_file(tmp_path / "encoder.safetensors", img_size=(32, 32), embed_dim=128, depth=DEPTH)
        arguments = ["--config", str(ROOT / f"configs/{name}.yaml"), "--dry-run", "--ckpt", str(tmp_path)]
        options = [f"data.path={colored}", f"run.dir={tmp_path / 'run'}", *SMALLER.get(name, [])]
        assert finetune([*arguments, *options]) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", ["finetune_cifar_tiny", "finetune_base"])
def test_dry_run_from_a_start(plan_from_weights, name):
    plan = plan_from_weights(name)
    # The size of images is the config's: positions are interpolated to it.
    assert f"tiny-cifar, {32 if name == 'finetune_cifar_tiny' else 224}x" in plan
    assert "100.0%" in plan
    share = {"finetune_cifar_tiny": 0.8, "finetune_base": 0.65}[name]
    lowest, peak = map(float, re.findall(r"^lr +(\S+) in .* to (\S+)$", plan, re.MULTILINE)[0])
    assert lowest / peak == pytest.approx(share ** (DEPTH + 1), rel=1e-3)


@pytest.mark.parametrize("name", ["linear_probe_cifar_tiny", "linear_probe_base"])
def test_dry_run_of_a_probe_from_a_start(plan_from_weights, name):
    plan = plan_from_weights(name)
    assert "100.0%" in plan
    peak = 0.1 * (4096 if name.endswith("base") else 256) / 256
    assert f"{', '.join(f'{factor * peak:.3g}' for factor in (0.1, 0.3, 1, 3, 10))} after" in plan
