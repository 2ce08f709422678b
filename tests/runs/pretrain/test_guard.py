"""Bad steps: found, gone back from, and passed by leaving their data out."""

import json

import numpy as np
import pytest
from helpers.commands import lines_of, summary_of
from helpers.leaked_tensors import Leftovers

from mae_vit.config.schema import GuardSection
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, data_step, skip
from mae_vit.runtime.failures import BadStep
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, list_checkpoints, load_checkpoint, step_of
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.recovery import Guard, Recovery

BATCH = 128  # of mae_digits
LENGTH = ["train.steps=12", "checkpoint.every_steps=4", "checkpoint.keep_last=9", "guard.skip_steps=2"]


@pytest.fixture
def batch_of(digits):
    order = GlobalOrder(len(open_index(digits, "train")), BATCH, 0)

    def samples(data_step: int) -> np.ndarray:
        epoch, step = divmod(data_step, order.steps_per_epoch)
        return order.samples(epoch, step * BATCH, (step + 1) * BATCH)

    return samples


# A step is read when the next one has been taken, or at once where a line is logged.
@pytest.mark.parametrize("late", [False, True])
def test_a_bad_batch_is_passed_by(call, digits, tmp_path, poison, batch_of, late):
    often = [f"monitor.log_every_steps={100 if late else 1}", "monitor.evaluate_every_steps=100"]
    assert call(*LENGTH, *often, name="straight") == 0
    bad = int(batch_of(6)[5])
    seen = poison(float("nan"), lambda samples: bad in samples and np.array_equal(samples, batch_of(6)))
    assert call(*LENGTH, *often) == 0
    folder = tmp_path / "run"
    expected = [*range(7 + late), 4, *range(7, 14)]
    assert [samples.tolist() for samples in seen] == [batch_of(step).tolist() for step in expected]
    guarded, straight = lines_of(folder), lines_of(tmp_path / "straight")
    assert [line["step"] for line in guarded] == [line["step"] for line in straight]
    assert [line["loss"] for line in guarded if line["step"] <= 5] == [
        line["loss"] for line in straight if line["step"] <= 5
    ]
    assert summary_of(folder)["status"] == "done"
    incident = json.loads((folder / "incidents" / "step-00000007-1.json").read_text())
    assert "nan" in incident["reason"]
    assert (incident["back_to_step"], incident["skipped_data_steps"]) == (4, [5, 7])
    assert [sample["sample"] for sample in incident["samples"]] == batch_of(6).tolist()
    index = open_index(digits, "train")
    assert incident["samples"][5]["key"] == index.keys()[bad]
    last = load_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    assert last.state.course.skipped == ((5, 7),)


def test_a_run_that_passed_a_bad_batch_resumes_exactly(
    call, poison, batch_of, checkpoint, encoder, monkeypatch
):
    poison(float("nan"), lambda samples: np.array_equal(samples, batch_of(6)))
    left = Leftovers(monkeypatch)
    assert call(*LENGTH) == 0
    # Nothing of the checkpoint stays in memory. At first the state of step 0 may still be on its way to the disk.
    assert len(left.read) > 40
    assert left.alive[1:] == [0]
    # From before the batch, too: a new folder can go back to what it began from.
    for step in (8, 4):
        assert call(*LENGTH, "--resume", str(checkpoint("run", step)), name=f"rest-{step}") == 0
        assert encoder("run") == encoder(f"rest-{step}")


# Without any rollback, skip_steps would have no effect.
@pytest.mark.parametrize(
    ("rollbacks", "options"), [(3, LENGTH), (0, [*LENGTH[:-1], "guard.max_rollbacks=0"])]
)
def test_what_stays_bad_stops_the_run(call, tmp_path, capsys, poison, batch_of, rollbacks, options):
    good = {tuple(batch_of(step)) for step in range(6)}
    poison(float("inf"), lambda samples: tuple(samples) not in good)
    assert call(*options) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: step 7 " if not rollbacks else "error: step ")
    assert f"{rollbacks} of guard.max_rollbacks={rollbacks}" in last
    folder = tmp_path / "run"
    assert len(list((folder / "incidents").glob("*.json"))) == rollbacks + 1
    assert summary_of(folder)["status"] == "failed"
    assert load_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).step == 4


def test_before_the_first_save_it_goes_back_to_the_beginning(call, tmp_path, poison, batch_of):
    poison(float("nan"), lambda samples: np.array_equal(samples, batch_of(1)))
    assert call(*LENGTH) == 0
    incident = json.loads((tmp_path / "run" / "incidents" / "step-00000002-1.json").read_text())
    assert (incident["back_to_step"], incident["skipped_data_steps"]) == (0, [0, 2])


def test_weights_that_are_not_finite_are_never_saved(call, tmp_path, monkeypatch):
    step = TorchEngine.step

    def poisoned(self, lr):
        result = step(self, lr)
        if self.updates == 4:  # as an update that overflows; this step's loss and norm are finite
            next(iter(self.trainable.values())).data.fill_(float("inf"))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", poisoned)
        assert call(*LENGTH) == 1
    folder = tmp_path / "run" / "checkpoints"
    assert [load_checkpoint(path).step for path in list_checkpoints(folder)] == [0]
    assert list((tmp_path / "run" / "incidents").iterdir())
    # Another config may take the place of a run that trained nothing: its incidents go, too.
    assert call(*LENGTH, "optim.lr=1e-4") == 0
    assert not (tmp_path / "run" / "incidents").exists()


def test_a_spike_is_many_steps_not_one():
    losses = np.random.default_rng(0).normal(1.0, 0.01, 400)
    guard = Guard(GuardSection(), LossHistory())
    losses[150] = 9.0
    losses[300:] = 2.0
    for step, loss in enumerate(losses[:307], start=1):
        guard.check(step, float(loss), 1.0)
        assert guard.no_suspects == (step != 151 and step <= 300)
    resumed = Guard(GuardSection(), guard.course)
    for one in (guard, resumed):
        with pytest.raises(BadStep, match="step 301 "):
            one.check(308, 2.0, 1.0)
    unwatched = Guard(GuardSection(spike_sigmas=None), LossHistory())
    for step, loss in enumerate(losses, start=1):
        unwatched.check(step, float(loss), 1.0)


def test_a_spike_takes_a_run_back(call, tmp_path, poison, batch_of):
    # Losses before it are too few to know their spread, and the eight of the spike are high once only.
    spike = {tuple(batch_of(step)) for step in range(131, 139)}

    def first_time(samples) -> bool:
        high = tuple(samples) in spike
        spike.discard(tuple(samples))
        return high

    seen = poison(50.0, first_time)
    length = ["train.steps=145", "checkpoint.every_steps=10", "monitor.log_every_steps=1"]
    assert call(*length) == 0
    folder = tmp_path / "run"
    (path,) = (folder / "incidents").glob("*.json")
    incident = json.loads(path.read_text())
    assert "spike" in incident["reason"]
    assert (incident["step"], incident["back_to_step"]) == (132, 130)
    assert len(seen) == 139 + 145 - 130
    losses = [line["loss"] for line in lines_of(folder) if line["step"] > 130]
    assert len(losses) == 15
    assert max(losses) < 5
    assert summary_of(folder)["status"] == "done"


def test_a_save_waits_for_a_good_step(call, tmp_path, poison, batch_of):
    hard = tuple(batch_of(139))
    poison(50.0, lambda samples: tuple(samples) == hard)
    assert call("train.steps=145", "checkpoint.every_steps=140", "checkpoint.keep_last=9") == 0
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [0, 141, 145]


def test_a_longer_run_may_have_higher_losses(tmp_path):
    def bound(epochs: float) -> float | None:
        before = CheckpointInfo(tmp_path, 200, {"train.epochs": 2.0}, LossHistory((3,), (0.01,) * 200))
        nothing = dict.fromkeys(("folder", "samples_of", "quarantine", "ranks", "say"))
        recovery = Recovery(GuardSection(), before, identity={"train.epochs": epochs}, **nothing)
        assert recovery.guard.course.skipped == (3,)
        return recovery.guard._bound()

    assert bound(2.0) == 0.01
    assert bound(4.0) is None


def test_skipped_steps_move_the_others_up():
    skipped = skip(skip(skip((), 5, 7), 10, 12), 7, 8)
    assert skipped == ((5, 8), (10, 12))
    left = [step for step in range(20) if step not in (5, 6, 7, 10, 11)]
    assert [data_step(step, skipped) for step in range(15)] == left
