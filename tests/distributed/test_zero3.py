"""Whole runs at ZeRO 3: pictures, held-out metrics, checkpoints and export are those of any engine."""

import json
import shutil

import pytest
from distributed.launch import Run
from safetensors.torch import load_file

SMALL = [
    # Small, but with parameters that ZeRO 3 shards: of more than 100,000 numbers.
    *("--config", "configs/pretrain/mae_digits.yaml", "model.embed_dim=192", "model.num_heads=3"),
    *("model.depth=1", "objective.decoder_embed_dim=32", "objective.decoder_depth=1", "train.steps=6"),
    *("train.warmup_steps=1", "monitor.log_every_steps=1", "monitor.evaluate_every_steps=3"),
    # One rank has one more batch of them than the other.
    *("monitor.evaluate_images=65", "train.batch_size_per_device=32", "monitor.tensorboard=false"),
    *("checkpoint.every_steps=2", "checkpoint.keep_last=9", "run.name=same"),
]


@pytest.mark.slow
@pytest.mark.distributed
def test_zero_3_is_a_run_like_any_other(digits, tmp_path):
    arguments = [*SMALL, f"data.path={digits}"]
    straight = Run(tmp_path / "straight", "python", 1, [*arguments, "train.engine=torch"])
    sharded = Run(tmp_path / "sharded", "deepspeed", 2, [*arguments, "train.zero_stage=3"])
    for run in (straight, sharded):
        assert run.wait() == 0, run.output()
    # Half of it on two ranks at ZeRO 3, the other half on one without sharding.
    mixed = tmp_path / "mixed"
    shutil.copytree(
        tmp_path / "sharded" / "checkpoints" / "step-00000004", mixed / "checkpoints" / "step-00000004"
    )
    last = Run(mixed, "python", 1, [*arguments, "train.engine=torch"])
    assert last.wait() == 0, last.output()
    assert "step 4 of 6" in last.output()
    expected = load_file(tmp_path / "straight" / "encoder.safetensors")
    metrics = json.loads((tmp_path / "straight" / "summary.json").read_text())["heldout"]
    for name in ("sharded", "mixed"):
        weights = load_file(tmp_path / name / "encoder.safetensors")
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            assert weights[key].isfinite().all()
            # Keys' biases have no gradient but rounding, which Adam takes for one.
            assert key.endswith("qkv.bias") or (weights[key] - value).abs().max() < 2e-5, f"{name}: {key}"
        assert (tmp_path / name / "pictures" / "step-00000006.png").exists()
        heldout = json.loads((tmp_path / name / "summary.json").read_text())["heldout"]
        assert heldout == pytest.approx(metrics, rel=1e-4, abs=1e-4)
