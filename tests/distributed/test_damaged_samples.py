"""Damaged samples on several ranks: one list, one budget, one end."""

import pytest
from distributed.launch import Run
from helpers.commands import SMALL_MAE, summary_of
from helpers.damage import WAYS, copy_of, damage

OPTIONS = [
    *(
        "--config",
        "configs/pretrain/mae_digits.yaml",
        *SMALL_MAE[1:],
        "model.patch_size=4",
        "data.source=tar",
    ),
    *("train.effective_batch_size=96", "train.steps=10", "train.warmup_steps=1", "monitor.tensorboard=false"),
    *("monitor.log_every_steps=4", "monitor.evaluate_every_steps=10", "monitor.evaluate_images=16"),
    *("checkpoint.every_steps=3", "monitor.probe_queries=0", "run.name=same", "data.workers=1"),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("budget", "status", "code"), [(0.05, "done", 0), (0.012, "failed", 1)])
def test_two_ranks_list_what_one_process_lists(digits, tmp_path, budget, status, code):
    copy = copy_of(digits, tmp_path / "data")
    # Neighbors too, which one rank meets on the way to a whole one and another as its own.
    bad = [*range(30, 1400, 90), *range(700, 716)]
    damage(digits, copy, {sample: list(WAYS)[number % 2] for number, sample in enumerate(bad)})
    arguments = [*OPTIONS, f"data.path={copy}", f"data.damage_budget={budget}"]
    lists = []
    for name, launcher, ranks, engine in (
        ("alone", "python", 1, "torch"),
        ("two", "torchrun", 2, "deepspeed"),
    ):
        run = Run(tmp_path / name, launcher, ranks, [*arguments, f"train.engine={engine}"])
        assert run.wait() == code, run.output()
        run.wait_until_gone()
        assert run.status() == status, run.output()
        lists.append((tmp_path / name / "quarantine.jsonl").read_bytes())
        count = summary_of(tmp_path / name)["damaged_samples"]
        assert count == len(lists[-1].splitlines()) > (0 if status == "done" else int(budget * 1497))
        if status == "failed":
            assert f"{count} of 1,497 samples are damaged, data.damage_budget=0.012 allows 17" in run.output()
    assert lists[0] == lists[1]
