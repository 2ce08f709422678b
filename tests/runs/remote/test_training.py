"""Training on shards elsewhere is training on those here."""

import pytest
from helpers.batch_digests import digest_of_global_batches
from helpers.commands import ROOT, SMALL_MAE, lines_of, run
from helpers.finetune import SMALL, TINY
from helpers.servers.remote_shards import STEPS

from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder
from mae_vit.finetuning.command import main as finetune

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize(
    ("workers", "world_size"), [(0, 1), (0, 4), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_batches_are_those_of_the_shards_here_and_each_shard_is_fetched_once(
    source, server, tmp_path, workers, world_size
):
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"))
    order = GlobalOrder(len(open_index(source, "train")), 96, 7)
    near = digest_of_global_batches(source, order, "tar", 1, 0, STEPS)
    far = digest_of_global_batches(folder, order, "tar", world_size, workers, STEPS)
    assert far == near
    fetched = [name for name, _ in server.requests if name.endswith(".tar")]
    assert len(fetched) == len(set(fetched)) > 0


@pytest.mark.slow
def test_a_vanished_server_leaves_a_run_to_be_started_again(source, server, tmp_path):
    server.faults["*.tar"] = [*[""] * 4, "always 503"]
    script = (
        "import sys; from mae_vit.data.remote import cache; "
        "cache.Cache.__init__.__kwdefaults__['patience_s'] = 0.5; "
        "from mae_vit.pretraining.command import main; sys.exit(main())"
    )
    arguments = [
        *("--config", "configs/pretrain/mae_digits.yaml", "monitor.log_every_steps=1", "data.workers=1"),
        *("train.epochs=null", "train.steps=24", "train.warmup_epochs=0", "data.source=tar", *SMALL_MAE),
        *("train.effective_batch_size=96", "data.damage_budget=0.5"),
    ]
    near, far = [f"data.path={source}"], [f"data.path={server.url}", f"data.cache_dir={tmp_path / 'cache'}"]
    for name, words in (("near", near), ("far", far)):
        words.append(f"run.dir={tmp_path / name}")
    done = run("-c", script, *arguments, *far)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "error: " in done.stderr
    assert "cannot be fetched" in done.stderr
    assert "Traceback" not in done.stderr
    server.faults["*.tar"] = ["drop", "", "wrong", "503", "", "drop"]
    for words in (near, far):
        assert run("pretrain/run.py", *arguments, *words).returncode == 0
    assert server.faults["*.tar"] == []
    losses = [
        [line["loss"] for line in lines_of(tmp_path / name) if "loss" in line] for name in ("near", "far")
    ]
    assert losses[0] == losses[1]


def test_a_plan_of_fine_tuning_does_not_fetch_all(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mae_vit.finetuning.data._PLANNED_GIB", 0.0)
    # As few tries as it can be, on a processor of any speed.
    monkeypatch.setattr("mae_vit.training.step_time._ALL_S", 0.0)
    words = ["--config", str(ROOT / "configs/finetune/finetune_cifar_tiny.yaml"), "--dry-run", *SMALL, *TINY]
    words += [
        f"data.path={server.url}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert finetune(words) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert not [name for name, _ in server.requests if name.endswith(".tar")]
    assert finetune([*words, "finetune.holdout=0", "data.source=tar"]) == 0
    assert 0 < len({name for name, _ in server.requests if name.endswith(".tar")}) < 64
    assert not (tmp_path / "run").exists()
