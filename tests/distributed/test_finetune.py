"""Fine-tuning under launchers: layer-wise rates, held-out choice and test are those of one process."""

import json
import re
import shutil

import numpy as np
import pytest
from distributed.launch import Run, finished
from helpers.commands import summary_of
from helpers.finetune import SMALL, TINY
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed
SCRIPT, FAULTS = "finetune/run.py", "tests/distributed/workers/finetune_with_faults.py"
OPTIONS = [*SMALL, *TINY, "optim.layer_decay=0.6", "finetune.pool=mean", "run.name=same"]
FEW = ["data.labels_per_class=40", "train.effective_batch_size=64", "train.epochs=4", "train.warmup_epochs=1"]
CONFIGS = {
    "finetune": ["--config", "configs/finetune/finetune_cifar_tiny.yaml", *OPTIONS],
    "linear_probe": [
        "--config",
        "configs/finetune/linear_probe_cifar_tiny.yaml",
        *TINY,
        *FEW,
        "run.name=same",
    ],
    "network": ["--config", "configs/simple_cnn_cifar.yaml", *SMALL, TINY[0], TINY[2], "run.name=same"],
}
MODES = {"finetune": "model.safetensors", "linear_probe": "linear.safetensors"}


@pytest.mark.parametrize(
    ("launcher", "stage", "network"),
    [
        pytest.param("deepspeed", 2, False, marks=pytest.mark.slow),
        pytest.param("deepspeed", 3, False, marks=pytest.mark.slow),
        ("torchrun", 0, False),
        pytest.param("torchrun", 0, True, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_do_what_one_process_does(digits, tmp_path, launcher, stage, network):
    config = CONFIGS["network" if network else "finetune"]
    arguments = [*config, f"data.path={digits}", "optim.name=sgd"]
    finished(tmp_path / "alone", "python", 1, arguments, SCRIPT)
    finished(tmp_path / "ranks", launcher, 2, [*arguments, f"train.zero_stage={stage}"], SCRIPT)
    alone, ranks = (summary_of(tmp_path / name) for name in ("alone", "ranks"))
    assert alone["test_size"] == ranks["test_size"]
    expected, weights = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "ranks"))
    assert expected.keys() == weights.keys()
    if network:
        # BatchNorm sees half the batch on each rank: the same kind of run, not the same numbers.
        assert all(value.isfinite().all() for value in weights.values())
        assert (tmp_path / "ranks" / "predictions.csv").exists()
        return
    assert alone["best_step"] == ranks["best_step"]
    for key, value in expected.items():
        assert (weights[key] - value).abs().max() < 2e-5, key
    for name in ("train_top1", "val_top1", "test_top1"):
        assert alone[name] == pytest.approx(ranks[name], abs=0.01), name


@pytest.mark.slow
def test_two_ranks_share_the_encoding_of_a_linear_probe(digits, tmp_path):
    arguments = [*CONFIGS["linear_probe"], f"data.path={digits}"]
    finished(tmp_path / "alone", "python", 1, arguments, SCRIPT)
    finished(tmp_path / "ranks", "torchrun", 2, arguments, SCRIPT)
    expected, weights = (load_file(tmp_path / name / "linear.safetensors") for name in ("alone", "ranks"))
    for key, value in expected.items():
        assert value.abs().max() > 0.01
        assert (weights[key] - value).abs().max() < 1e-4, key
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("alone", "ranks")]
    assert results[0]["probe_rates"] == results[1]["probe_rates"]
    assert results[0]["test_top1"] == pytest.approx(results[1]["test_top1"], abs=0.01)


@pytest.mark.parametrize("mode", ["knn", pytest.param("few_shot", marks=pytest.mark.slow)])
def test_two_ranks_share_the_queries_of_frozen_features(digits, tmp_path, mode):
    """A rank scores its share alone; together they score what one process does."""
    arguments = [*CONFIGS["finetune"][:2], *SMALL, *TINY, "run.name=same"]
    arguments += [f"data.path={digits}", f"finetune.mode={mode}"]
    finished(tmp_path / "alone", "python", 1, arguments, SCRIPT)
    ranks = finished(tmp_path / "ranks", "torchrun", 2, ["noted=1", *arguments], FAULTS)
    shares = [int(number) for number in re.findall(r"scored (\d+) queries", ranks.output())]
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("alone", "ranks")]
    # Few-shot scores them once for each draw, of each number of shots.
    calls = 2 * sum(len(each["draws"]) for each in results[0].get("few_shot", {"": {"draws": [0]}}).values())
    assert len(shares) == calls
    assert sum(shares) == calls // 2 * results[0]["test_size"]
    assert max(shares) - min(shares) <= 1
    for name in ("test_top1", "test_top5", "few_shot"):
        assert results[0].get(name) == results[1].get(name), name
    expected, on_ranks = (
        np.genfromtxt(tmp_path / name / "predictions.csv", delimiter=",", skip_header=1)
        for name in ("alone", "ranks")
    )
    assert np.isfinite(expected[:, 1:]).all()
    np.testing.assert_allclose(on_ranks, expected, atol=2e-5)


def failed(folder, fault: str, arguments: list[str]) -> str:
    """What a run with a fault says, which leaves no process."""
    run = Run(folder, "torchrun", 2, [fault, *arguments], script=FAULTS)
    assert run.wait(240) != 0
    run.wait_until_gone()
    return run.output()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_full_ends_all_ranks(digits, tmp_path, mode):
    """One rank writes; the others must not wait for it."""
    arguments, file = [*CONFIGS[mode], f"data.path={digits}"], MODES[mode]
    for full, said in (
        ("config.yaml", "config.yaml: no space left on device"),
        (file, "results cannot be written to"),
    ):
        output = failed(tmp_path / "run", f"full={full}", arguments)
        assert said in output
        assert "OSError" not in output
    finished(tmp_path / "run", "torchrun", 2, arguments, FAULTS)
    assert (tmp_path / "run" / file).exists()


@pytest.mark.slow
def test_a_node_that_sees_late_that_all_is_done_does_not_wait(digits, tmp_path):
    arguments, late = [*CONFIGS["linear_probe"], f"data.path={digits}"], tmp_path / "late"
    finished(tmp_path / "run", "torchrun", 2, arguments, FAULTS)
    shutil.copytree(tmp_path / "run", late)
    (late / "summary.json").write_text(json.dumps({**summary_of(late), "status": "running"}))
    again = finished(tmp_path / "run", "torchrun", 2, [f"late={late}", *arguments], FAULTS)
    assert "is finished" in again.output()


@pytest.mark.slow
def test_what_one_rank_cannot_read_fails_all(digits, tmp_path):
    """It dies, which the others see; what is written alone may be taken for a full disk."""
    arguments = [*CONFIGS["finetune"], f"data.path={digits}"]
    output = failed(tmp_path / "run", "unread=1", arguments)
    assert "many open files" in output
    assert "results cannot be written" not in output
    finished(tmp_path / "run", "torchrun", 2, arguments, FAULTS)
    longer = [*arguments, "train.steps=8", "--extend"]
    assert "what rank 0 can" in failed(tmp_path / "run", "torn=1", longer)
