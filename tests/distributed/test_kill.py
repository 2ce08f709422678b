"""A kill (SIGKILL) at any moment loses nothing beyond the last save, and changes nothing."""

import random
import time

import psutil
import pytest
from distributed.launch import Run, logged_steps

pytestmark = pytest.mark.distributed


MAE = [
    *("--config", "configs/pretrain/mae_digits.yaml"),
    *("objective.decoder_embed_dim=32", "objective.decoder_depth=1"),
]
JOINT = [
    *("--config", "configs/pretrain/joint_cifar_tiny.yaml", "model.img_size=8", "model.patch_size=2"),
    *("model.in_chans=1", "objective.mae.decoder_embed_dim=32", "objective.mae.decoder_depth=1"),
    *("train.effective_batch_size=128", "train.precision=fp32"),
]
STEPS_PER_EPOCH = 11


def arguments(data, source: str, order: str, objective: list[str] = MAE, *, epochs: int = 20) -> list[str]:
    return [
        *(*objective, f"data.path={data}", f"data.source={source}", f"data.order={order}"),
        *("data.augment.crop=random_resized", "data.augment.flip=true", f"train.epochs={epochs}"),
        *("model.embed_dim=32", "model.depth=2", f"data.workers={int(source == 'tar')}"),
        *("train.warmup_epochs=1", "monitor.log_every_steps=1", "monitor.evaluate_every_epochs=4"),
        *("monitor.evaluate_images=64", "checkpoint.every_steps=4"),
    ]


def finish(run: Run, *, epochs: int) -> bytes:
    assert run.wait(300) == 0, run.output()
    run.wait_until_gone()
    assert run.status() == "done"
    assert logged_steps(run.folder) == list(range(1, epochs * STEPS_PER_EPOCH + 1))
    return (run.folder / "encoder.safetensors").read_bytes()


def ten_times(ranks: int, source: str, order: str):
    marks = [pytest.mark.slow, pytest.mark.timeout(1800)]
    name = f"ten times, {ranks} ranks, {source}, {order}"
    return pytest.param(ranks, source, 10, {"order": order, "epochs": 20}, marks=marks, id=name)


@pytest.mark.parametrize(
    ("ranks", "source", "kills", "more"),
    [
        pytest.param(2, "memory", 1, {"epochs": 3}, id="once"),
        pytest.param(2, "tar", 2, {"zero": 1, "epochs": 6}, marks=pytest.mark.slow, id="twice"),
        *[
            ten_times(ranks, source, order)
            for ranks in (1, 2)
            for source, order in (("memory", "global"), ("tar", "global"), ("tar", "blocks"))
        ],
        pytest.param(
            *(2, "memory", 5, {"objective": JOINT, "epochs": 20}),
            marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
            id="five times, joint",
        ),
    ],
)
def test_a_killed_run_ends_bit_identical(digits, many_shards, tmp_path, ranks, source, kills, more):
    launcher, epochs, zero = "python" if ranks == 1 else "deepspeed", more["epochs"], more.get("zero", 0)
    order, objective = more.get("order", "global"), more.get("objective", MAE)
    data = many_shards if order == "blocks" else digits
    options = [*arguments(data, source, order, objective, epochs=epochs), f"train.zero_stage={zero}"]
    expected = finish(Run(tmp_path / "straight", launcher, ranks, options), epochs=epochs)
    chance = random.Random(f"{ranks}{source}{zero}")
    while True:
        run = Run(tmp_path / "killed", launcher, ranks, options)
        if kills == 0:
            break
        with run:
            # Mostly while it trains and saves; at times while it starts.
            if chance.random() < 0.8:
                run.wait_for_step(min(run.step() + chance.randint(1, 30), epochs * STEPS_PER_EPOCH - 1))
            time.sleep(chance.random() * (2.0 if kills % 3 == 0 else 0.2))
            if run.process.poll() is None:
                kills -= 1
    assert finish(run, epochs=epochs) == expected


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_while_saving_ends_bit_identical(digits, tmp_path, ranks):
    """Fifteen times, aimed at saves, of which there is one after each step; more than five must hit one."""
    launcher = "python" if ranks == 1 else "deepspeed"
    options = [*arguments(digits, "memory", "global", epochs=12), "checkpoint.every_steps=1"]
    expected = finish(Run(tmp_path / "straight", launcher, ranks, options), epochs=12)
    chance, torn = random.Random(ranks), 0
    for _ in range(15):
        with Run(tmp_path / "killed", launcher, ranks, options) as run:
            run.wait_for_step(min(run.step() + chance.randint(1, 8), 12 * STEPS_PER_EPOCH - 1))
            checkpoints = run.folder / "checkpoints"
            until = time.monotonic() + 500
            while not any(checkpoints.glob(".step-*")) and run.process.poll() is None:
                assert time.monotonic() < until
            time.sleep(chance.random() * 0.01)
        torn += any(checkpoints.glob(".step-*"))
    assert finish(Run(tmp_path / "killed", launcher, ranks, options), epochs=12) == expected
    assert torn > 5, "most kills missed the saves"


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_data_workers(digits, tmp_path):
    """Workers and the server they are forked from would hold their memory for ever."""
    options = [
        *("--config", "configs/pretrain/mae_digits.yaml", f"data.path={digits}", "model.embed_dim=32"),
        *("model.depth=1", "train.epochs=3000", "train.engine=torch", "data.source=tar", "data.workers=2"),
        *("monitor.log_every_steps=5", "monitor.tensorboard=false"),
    ]
    with Run(tmp_path / "run", "python", 1, options) as run:
        run.wait_for_step(10)
        family = run.ranks()[0].children(recursive=True)
        assert len(family) >= 3
    assert psutil.wait_procs(family, timeout=500)[1] == []
