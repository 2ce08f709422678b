"""The other jobs: fine-tuning and comparisons go on after the limit; the doctor looks at all nodes."""

import pytest
from helpers.commands import csv_rows, lines_of, summary_of
from slurm.cluster import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

TINY = {
    "model.img_size": "8",
    "model.patch_size": "2",
    "model.in_chans": "1",
    "model.embed_dim": "16",
    "model.depth": "1",
    "model.num_heads": "2",
    "data.augment.flip": "false",
    "train.effective_batch_size": "64",
    "train.steps": "60",
    "train.warmup_steps": "1",
    "monitor.log_every_steps": "1",
    "monitor.tensorboard": "false",
    "checkpoint.every_steps": "10",
}
COMPARISON = """
run: {{name: small}}
data: {{path: {data}}}
set: {{{settings}}}
entries:
  - {{name: ViT from scratch, config: finetune_cifar_tiny.yaml}}
reference: ViT from scratch
labels_per_class: [25]
seeds: [0, 1, 2, 3]
parallel: 1
"""


def test_a_fine_tuning_goes_on_after_the_limit(cluster, digits, tmp_path):
    # So many that it still trains when the signal comes.
    settings = TINY | {"train.steps": "4000", "checkpoint.every_steps": "200"}
    folder = tmp_path / "run"
    words = [
        "--config",
        "configs/finetune/finetune_cifar_tiny.yaml",
        f"data.path={digits}",
        f"run.dir={folder}",
    ]
    job = cluster.submit(
        folder, "slurm/finetune.sh", *words, *(f"{key}={value}" for key, value in settings.items())
    )
    job.wait_for("\nstep 15/")
    job.tell_of_limit()
    assert job.wait() == "COMPLETED", job.output()
    assert job.shown("Restarts") == "1"
    assert "resuming from" in job.output()
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 4001))
    assert summary_of(folder)["status"] == "done"


def test_an_array_shares_a_comparison_and_its_tasks_are_requeued_one_by_one(cluster, digits, tmp_path):
    folder = tmp_path / "compared"
    config = tmp_path / "small.yaml"
    settings = ", ".join(f"{key}: {value}" for key, value in TINY.items())
    config.write_text(COMPARISON.format(data=digits, settings=settings))
    array = cluster.submit(folder, "--array=0-1", "slurm/compare.sh", str(config), f"run.dir={folder}")
    tasks = [Job(cluster, f"{array.number}_{task}", array.log) for task in (0, 1)]
    # Both are at work.
    tasks[1].wait_until(lambda: len(list(folder.rglob("metrics.jsonl"))) >= 2, "two runs")
    # The last task's number is also that of the whole array.
    assert tasks[1].shown("JobId") == array.number
    tasks[1].tell_of_limit()
    assert [task.wait() for task in tasks] == ["COMPLETED", "COMPLETED"], array.output()
    assert [task.shown("Restarts") for task in tasks] == ["0", "1"]
    assert sorted(line["seed"] for line in csv_rows(folder / "results.csv")) == ["0", "1", "2", "3"]
    assert (folder / "report.html").exists()


def test_the_doctor_looks_at_both_nodes(cluster, settings, tmp_path):
    folder = tmp_path / "run"
    job = cluster.submit(folder, "--nodes=2", "slurm/doctor.sh", *settings, f"run.dir={folder}")
    assert job.wait() == "COMPLETED", job.output()
    for said in ("2 ranks met at", "ranks add", "ok   samples"):
        assert said in job.output()
    wrong = [word if not word.startswith("data.path") else f"data.path={tmp_path}" for word in settings]
    job = cluster.submit(folder, "--nodes=2", "slurm/doctor.sh", *wrong, f"run.dir={folder}")
    assert job.wait() == "FAILED", job.output()
    assert job.shown("Restarts") == "0"
    assert "FAIL plan" in job.output()
