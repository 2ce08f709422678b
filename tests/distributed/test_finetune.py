"""Fine-tuning under launchers: layer-wise rates, held-out choice and test are those of one process."""

import json
import re
import shutil

import numpy as np
import pytest
from distributed.launch import Run
from helpers.commands import ROOT
from helpers.finetune import SMALL, TINY
from safetensors.torch import load_file

from mae_vit.finetuning.command import main

OPTIONS = [*SMALL, *TINY, "optim.layer_decay=0.6", "finetune.pool=mean", "run.name=same"]
FEW = ["data.labels_per_class=40", "train.effective_batch_size=64", "train.epochs=4", "train.warmup_epochs=1"]


@pytest.mark.distributed
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
    config = "simple_cnn_cifar" if network else "finetune_cifar_tiny"
    options = [*SMALL, TINY[0], TINY[2], "run.name=same"] if network else OPTIONS
    arguments = ["--config", f"configs/{config}.yaml", *options, f"data.path={digits}", "optim.name=sgd"]
    script = "finetune/run.py"
    alone = Run(tmp_path / "alone", "python", 1, arguments, script=script)
    ranks = Run(tmp_path / "ranks", launcher, 2, [*arguments, f"train.zero_stage={stage}"], script=script)
    for run in (alone, ranks):
        assert run.wait() == 0, run.output()
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("alone", "ranks")]
    assert summaries[0]["test_size"] == summaries[1]["test_size"]
    expected, weights = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "ranks"))
    assert expected.keys() == weights.keys()
    if network:
        # BatchNorm sees half the batch on each rank: the same kind of run, not the same numbers.
        assert all(value.isfinite().all() for value in weights.values())
        assert (tmp_path / "ranks" / "predictions.csv").exists()
        return
    assert summaries[0]["best_step"] == summaries[1]["best_step"]
    for key, value in expected.items():
        assert (weights[key] - value).abs().max() < 2e-5, key
    for name in ("train_top1", "val_top1", "test_top1"):
        assert summaries[0][name] == pytest.approx(summaries[1][name], abs=0.01), name


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_share_the_encoding_of_a_linear_probe(digits, tmp_path):
    arguments = [
        "--config",
        "configs/finetune/linear_probe_cifar_tiny.yaml",
        *TINY,
        *FEW,
        f"data.path={digits}",
    ]
    script = "finetune/run.py"
    alone = Run(tmp_path / "alone", "python", 1, arguments, script=script)
    ranks = Run(tmp_path / "ranks", "torchrun", 2, arguments, script=script)
    for run in (alone, ranks):
        assert run.wait() == 0, run.output()
    expected, weights = (load_file(tmp_path / name / "linear.safetensors") for name in ("alone", "ranks"))
    for key, value in expected.items():
        assert value.abs().max() > 0.01
        assert (weights[key] - value).abs().max() < 1e-4, key
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("alone", "ranks")]
    assert results[0]["probe_rates"] == results[1]["probe_rates"]
    assert results[0]["test_top1"] == pytest.approx(results[1]["test_top1"], abs=0.01)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["knn", pytest.param("few_shot", marks=pytest.mark.slow)])
def test_two_ranks_share_the_queries_of_frozen_features(digits, tmp_path, mode):
    """A rank scores its share alone; together they score what one process does."""
    arguments = [
        "--config",
        str(ROOT / "configs/finetune/finetune_cifar_tiny.yaml"),
        *SMALL,
        *TINY,
        f"data.path={digits}",
    ]
    arguments += [f"finetune.mode={mode}", "run.name=same"]
    ranks = Run(tmp_path / "ranks", "torchrun", 2, ["noted=1", *arguments], script=FAULTS)
    assert main([*arguments, f"run.dir={tmp_path / 'alone'}"]) == 0
    assert ranks.wait() == 0, ranks.output()
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


FAULTS = "tests/distributed/workers/finetune_with_faults.py"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "file"), [("finetune", "model.safetensors"), ("linear_probe", "linear.safetensors")]
)
def test_a_disk_that_is_full_at_the_end_ends_all_ranks(digits, tmp_path, mode, file):
    """One rank writes; the others must not wait for it."""
    config = {"finetune": "finetune_cifar_tiny", "linear_probe": "linear_probe_cifar_tiny"}[mode]
    options = OPTIONS if mode == "finetune" else [*TINY, *FEW, "run.name=same"]
    arguments = ["--config", f"configs/{config}.yaml", *options, f"data.path={digits}"]
    run = Run(tmp_path / "run", "torchrun", 2, [f"full={file}", *arguments], script=FAULTS)
    assert run.wait(240) != 0
    assert "results cannot be written to" in run.output()
    assert "OSError" not in run.output()
    run.wait_until_gone()
    again = Run(tmp_path / "run", "torchrun", 2, arguments, script=FAULTS)
    assert again.wait(240) == 0, again.output()
    assert (tmp_path / "run" / file).exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_node_that_sees_late_that_all_is_done_does_not_wait(digits, tmp_path):
    arguments = [
        "--config",
        "configs/finetune/linear_probe_cifar_tiny.yaml",
        *TINY,
        *FEW,
        f"data.path={digits}",
    ]
    arguments += ["run.name=same"]
    folder, late = tmp_path / "run", tmp_path / "late"
    begun = Run(folder, "torchrun", 2, arguments, script=FAULTS)
    assert begun.wait(240) == 0, begun.output()
    shutil.copytree(folder, late)
    summary = json.loads((late / "summary.json").read_text())
    (late / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    again = Run(folder, "torchrun", 2, [f"late={late}", *arguments], script=FAULTS)
    assert again.wait(240) == 0, again.output()
    assert "is finished" in again.output()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["finetune", "linear_probe"])
def test_a_disk_that_is_full_at_the_beginning_is_an_input_error_on_all_ranks(digits, tmp_path, mode):
    config = {"finetune": "finetune_cifar_tiny", "linear_probe": "linear_probe_cifar_tiny"}[mode]
    arguments = ["--config", f"configs/{config}.yaml", *TINY, *FEW, "run.name=same", f"data.path={digits}"]
    run = Run(tmp_path / "run", "torchrun", 2, ["full=config.yaml", *arguments], script=FAULTS)
    assert run.wait(240) != 0
    assert "config.yaml: no space left on device" in run.output()
    assert "OSError" not in run.output()
    run.wait_until_gone()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_cannot_read_the_test_split_leaves_none_waiting(digits, tmp_path):
    """It dies, which the others see; what is written alone may be taken for a full disk."""
    arguments = ["--config", "configs/finetune/finetune_cifar_tiny.yaml", *OPTIONS, f"data.path={digits}"]
    run = Run(tmp_path / "run", "torchrun", 2, ["unread=1", *arguments], script=FAULTS)
    assert run.wait(240) != 0
    assert "Too many open files" in run.output()
    assert "results cannot be written" not in run.output()
    run.wait_until_gone()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_checkpoint_that_one_rank_cannot_read_fails_all(digits, tmp_path):
    arguments = ["--config", "configs/finetune/finetune_cifar_tiny.yaml", *OPTIONS, f"data.path={digits}"]
    folder = tmp_path / "run"
    begun = Run(folder, "torchrun", 2, arguments, script=FAULTS)
    assert begun.wait(240) == 0, begun.output()
    longer = [*arguments, "train.steps=8", "--extend"]
    again = Run(folder, "torchrun", 2, ["torn=1", *longer], script=FAULTS)
    assert again.wait(240) != 0
    assert "cannot read what rank 0 can: " in again.output()
    again.wait_until_gone()
