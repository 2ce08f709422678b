"""Runs that go on with other numbers of ranks and other ZeRO stages than they began with."""

import json
import random
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path

import pytest
from distributed.launch import Run, finished
from helpers.commands import lines_of
from safetensors.torch import load_file
from torch.distributed import TCPStore

from mae_vit.runtime.ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SMALL = [
    *("--config", "configs/pretrain/mae_digits.yaml", "run.name=same", "train.precision=fp32"),
    # Small, but with parameters that ZeRO 3 shards: of more than 100,000 numbers.
    *("model.embed_dim=192", "model.num_heads=3", "model.depth=1"),
    *("objective.decoder_embed_dim=32", "objective.decoder_depth=1", "train.effective_batch_size=128"),
    *("data.augment.crop=random_resized", "data.augment.flip=true", "train.warmup_epochs=1"),
    *("monitor.log_every_steps=1", "monitor.tensorboard=false"),
    # One rank may have one more batch of them than the others.
    *("monitor.evaluate_images=65", "train.batch_size_per_device=32"),
    *("monitor.probe_queries=0", "checkpoint.keep_last=9"),
]
BEGUN, NEXT = 10, 20


def values_of(folder: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in lines_of(folder) if name in line}


@pytest.fixture(scope="module")
def begun(digits, tmp_path_factory):
    """A run of 30 steps, of which the checkpoint after 10 is kept, on one rank without DeepSpeed."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    options = [*SMALL, f"data.path={digits}", f"train.steps={BEGUN + NEXT}", "train.epochs=null"]
    options += [f"checkpoint.every_steps={BEGUN}", "monitor.evaluate_every_steps=30"]
    finished(folder, "python", 1, [*options, "train.engine=torch"])
    return folder, options


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "engine", "zero_stage"),
    [(ranks, "deepspeed", stage) for ranks in (1, 2, 4) for stage in (0, 1, 2, 3)]
    + [(2, "torch", 0), (4, "torch", 0)],
)
def test_the_next_losses_are_the_same(begun, tmp_path, ranks, engine, zero_stage):
    straight, options = begun
    folder = tmp_path / "run"
    name = f"checkpoints/step-{BEGUN:08d}"
    shutil.copytree(straight / name, folder / name)
    words = [*options, f"train.engine={engine}", f"train.zero_stage={zero_stage}"]
    finished(folder, "python" if ranks == 1 else "deepspeed", ranks, words)
    expected, losses = values_of(straight, "loss"), values_of(folder, "loss")
    assert list(losses) == list(range(BEGUN + 1, BEGUN + NEXT + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step
    # Held-out metrics, pictures and the encoder are those of any engine.
    (heldout,), (others,) = (values_of(place, "heldout").values() for place in (folder, straight))
    assert heldout == pytest.approx(others, rel=1e-3, abs=1e-3)
    assert (folder / "pictures" / f"step-{BEGUN + NEXT:08d}.png").exists()
    weights, whole = (load_file(place / "encoder.safetensors") for place in (folder, straight))
    assert weights.keys() == whole.keys()
    for key, value in weights.items():
        # Keys' biases have no gradient but rounding, which Adam takes for one.
        assert key.endswith("qkv.bias") or (value - whole[key]).abs().max() < 1e-3, key
        assert value.isfinite().all(), key


def seen(notes: Path) -> dict[int, list[list[int]]]:
    """By step, the samples of all ranks; what was computed again after a kill must be equal."""
    by_step: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for path in notes.parent.glob(f"{notes.name}.*"):
        for line in path.read_text().splitlines():
            try:
                step, *rest = json.loads(line)
            except ValueError:
                continue  # cut off by the kill
            assert by_step[step].setdefault(rest[1], rest) == rest
    return {step: sorted(samples.values()) for step, samples in sorted(by_step.items())}


def compare(place: Path, epochs: int, per_epoch: int) -> None:
    """The run "elastic" saw what "straight" saw, each image once an epoch, at the same rates and with its losses."""
    expected, elastic = (seen(place / f"{name}-notes") for name in ("straight", "elastic"))
    assert elastic == expected
    assert list(elastic) == list(range(epochs * per_epoch))
    for epoch in range(epochs):
        samples = [
            s for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for _, s, *_ in elastic[step]
        ]
        assert len(samples) == len(set(samples)) == per_epoch * 128
    rates = [values_of(place / name, "lr") for name in ("straight", "elastic")]
    assert rates[0] == rates[1]
    losses = [values_of(place / name, "loss") for name in ("straight", "elastic")]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.timeout(600)
def test_a_run_on_changing_ranks_sees_the_same(digits, tmp_path):
    """2, 1, 4 and again 2 ranks, with kills between, at changing ZeRO stages; at last on DistributedDataParallel."""
    epochs, per_epoch = 10, 11
    options = [*SMALL, f"data.path={digits}", f"train.epochs={epochs}", "checkpoint.every_steps=6"]
    options += ["monitor.evaluate_every_epochs=10"]

    def go(folder: Path, ranks: int, zero_stage: int, launcher: str = "deepspeed") -> Run:
        words = [f"notes={tmp_path / folder.name}-notes", *options, f"train.zero_stage={zero_stage}"]
        launcher = launcher if ranks > 1 else "python"
        return Run(folder, launcher, ranks, words, script="tests/distributed/workers/pretrain_recorded.py")

    straight = go(tmp_path / "straight", 2, 0)
    assert straight.wait(240) == 0, straight.output()
    chance = random.Random(0)
    for ranks, zero_stage, until in ((2, 1, 25), (1, 0, 50), (4, 3, 80)):
        with go(tmp_path / "elastic", ranks, zero_stage) as run:
            run.wait_for_step(until + chance.randint(0, 5), 200)
    run = go(tmp_path / "elastic", 2, 0, "torchrun")
    assert run.wait(240) == 0, run.output()
    engine = r"engine +torch, DistributedDataParallel \(auto"
    assert re.search(engine, (tmp_path / "elastic" / "plan.txt").read_text())

    compare(tmp_path, epochs, per_epoch)


def world_size(folder: Path) -> int:
    return json.loads((folder / "environment.json").read_text())["world_size"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_node_of_torchrun_leaves_and_returns(digits, tmp_path, monkeypatch, leaves):
    """`torchrun --nnodes=1:2`: the other node resumes alone from the last save, then with the one that returns."""
    epochs, per_epoch = 30, 11
    options = [*SMALL, f"data.path={digits}", f"train.epochs={epochs}", "checkpoint.every_steps=6"]
    options += ["monitor.evaluate_every_epochs=30"]
    # PyTorch 2.14 tells a returning node no address otherwise (docs/cluster.md).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # A machine that stays serves the store of the rendezvous.
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    nodes = ("--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic")
    nodes += (f"--rdzv-endpoint=127.0.0.1:{store.port}",)
    nodes += ("--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=1",)

    def go(name: str, launcher: str = "torchrun", **more) -> Run:
        words = [f"notes={tmp_path / name}-notes", *options]
        script = "tests/distributed/workers/pretrain_recorded.py"
        return Run(tmp_path / name, launcher, 1, words, script=script, **more)

    straight = go("straight", "python")
    assert straight.wait(240) == 0, straight.output()
    with go("elastic", nodes=nodes) as first:
        # The first node to come is rank 0.
        time.sleep(3)
        run = [first, go("elastic", nodes=nodes)]
        first.wait_for_step(25)
        assert world_size(first.folder) == 2
        gone, stays = run[leaves], run[1 - leaves]
        gone.kill_node()
        stays.wait_for_step(stays.step() + 15)
        assert world_size(stays.folder) == 1
        back = go("elastic", nodes=nodes)
        assert [node.wait(400) for node in (stays, back)] == [0, 0], stays.output()
        assert world_size(stays.folder) == 2
    compare(tmp_path, epochs, per_epoch)
