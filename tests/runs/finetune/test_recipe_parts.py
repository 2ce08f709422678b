"""The parts of a recipe in whole runs: average of the weights, frozen projection, teachers."""

import json
import shutil

import pytest
import torch
from helpers.commands import lines_of, summary_of
from helpers.finetune import CNN
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from mae_vit.models.encoder_file import read_metadata
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint

CLS = "finetune.pool=cls"


def parameters_at_each_step(folder) -> list[dict[str, torch.Tensor]]:
    return [load_checkpoint(path).state.parameters for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("options", [{}, CNN], ids=["ViT", "CNN"])
def test_the_average_is_of_all_steps_and_is_what_is_measured(call, tmp_path, options):
    every = ["checkpoint.every_steps=1", "finetune.holdout=0", "train.steps=5"]
    assert call(*every, name="plain", **options) == 0
    assert call(*every, "train.ema_decay=0.3", name="averaged", **options) == 0
    # The first are the weights before the first step.
    expected, *steps = parameters_at_each_step(tmp_path / "averaged")
    assert len(steps) == 5
    for update, now in enumerate(steps, start=1):
        decay = min(0.3, (1 + update) / (10 + update))
        expected = {name: decay * expected[name].double() + (1 - decay) * now[name].double() for name in now}
    saved = load_checkpoint(list_checkpoints(tmp_path / "averaged" / "checkpoints")[-1]).state
    model = load_file(tmp_path / "averaged" / "model.safetensors")
    prefix = "network." if options else "encoder."
    for name, value in expected.items():
        torch.testing.assert_close(saved.average[name].double(), value, atol=1e-6, rtol=1e-5)
        assert torch.equal(model[name.removeprefix(prefix)], saved.average[name]), name
    # Training itself does not see it.
    for ours, plain in zip(steps, parameters_at_each_step(tmp_path / "plain")[1:], strict=True):
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert not load_checkpoint(list_checkpoints(tmp_path / "plain" / "checkpoints")[-1]).state.average
    if options:
        # Statistics of BatchNorm are averaged with the weights; what they count is not.
        mean = "network.1.running_mean"
        assert not torch.equal(saved.average[mean], saved.buffers[mean])
        assert saved.average["network.1.num_batches_tracked"] == 5


def test_the_epoch_is_chosen_among_averages(call, tmp_path):
    assert call("train.ema_decay=0.7", "optim.lr=3e-2") == 0
    best = summary_of(tmp_path / "run")["best_step"]
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best:08d}").state
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(model["head.weight"], saved.average["head.weight"])
    assert not torch.equal(model["head.weight"], saved.parameters["head.weight"])


@pytest.fixture
def teacher(trained_teacher, tmp_path):
    """One for each test, to change as it likes."""
    return shutil.copytree(trained_teacher, tmp_path / "teacher")


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_learns_from_a_network(call, pretrained, teacher, tmp_path, capsys, kind):
    before = {path: path.read_bytes() for path in teacher.rglob("*") if path.is_file()}
    options = [CLS, f"finetune.teacher={teacher}", f"finetune.distillation={kind}", "train.steps=12"]
    assert call(*options, "data.labels_per_class=100", ckpt=pretrained) == 0
    assert "dist_token + head_dist" in capsys.readouterr().out
    # By way of the teacher it has seen all labels.
    assert read_metadata(tmp_path / "run" / "model.safetensors")["labels"]["per_class"] is None
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert {"dist_token", "head_dist.weight", "head.weight"} <= model.keys()
    # No weight of the teacher's is the student's.
    assert not any(name.startswith(("0.", "network.", "distillation")) for name in model)
    lines = lines_of(tmp_path / "run")
    weight = {"hard": 0.5, "soft": 0.1}[kind]
    for line in lines:
        mixed = (1 - weight) * line["label_loss"] + weight * line["teacher_loss"]
        assert line["loss"] == pytest.approx(mixed, rel=1e-5)
    assert lines[-1]["teacher_loss"] < lines[0]["teacher_loss"]
    assert {path: path.read_bytes() for path in teacher.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_what_a_student_learns_depends_on_the_teacher(call, teacher, tmp_path):
    base, taught = [CLS, "train.steps=4", "finetune.holdout=0"], f"finetune.teacher={teacher}"
    changes = (
        [],
        [taught],
        [taught, "finetune.distillation_weight=0.9"],
        [taught, "finetune.distillation=soft"],
        [taught, "finetune.distillation=soft", "finetune.distillation_temperature=1.0"],
    )
    for number, change in enumerate(changes):
        assert call(*base, *change, name=str(number)) == 0
    models = {(tmp_path / str(n) / "model.safetensors").read_bytes() for n in range(len(changes))}
    assert len(models) == len(changes)


@pytest.mark.slow
def test_another_teacher_is_another_run(call, teacher, tmp_path, capsys):
    options = [CLS, f"finetune.teacher={teacher}"]
    assert call(*options) == 0
    capsys.readouterr()
    assert call(CLS) == 2
    assert "finetune.teacher was" in capsys.readouterr().err
    weights = load_file(teacher / "model.safetensors")
    with safe_open(teacher / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file({name: value + 1 for name, value in weights.items()}, teacher / "model.safetensors", metadata)
    assert call(*options) == 2
    assert "finetune.teacher_digest" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["data.labels_per_class=20"], ["finetune.holdout=0.2"]])
def test_a_teacher_that_has_seen_the_held_out_labels_is_reported(call, teacher, capsys, words):
    assert call(CLS, f"finetune.teacher={teacher}", "--dry-run", *words) == 0
    assert (f"{teacher} was trained" in capsys.readouterr().err) == bool(words)


def test_a_distilled_run_neither_teaches_nor_begins_another(call, shared, trained_teacher, capsys):
    student = shared(CLS, f"finetune.teacher={trained_teacher}").folder
    assert call(CLS, f"finetune.teacher={student}") == 2
    assert "was distilled" in capsys.readouterr().err
    assert call(ckpt=student) == 2
    assert "was distilled" in capsys.readouterr().err


def test_teachers_that_do_not_fit_are_refused_in_a_line(call, teacher, tmp_path, capsys):
    assert call(CLS, f"finetune.teacher={teacher}", "--dry-run") == 0
    model = teacher / "model.safetensors"
    good = model.read_bytes()

    def with_metadata(**changes) -> bytes:
        with safe_open(model, framework="pt") as file:
            metadata = {**json.loads(file.metadata()["mae_vit"]), **changes}
        return save(load_file(model), {"mae_vit": json.dumps(metadata)})

    cases = {
        "file of weights": b"nonsense",
        "cannot be rebuilt": good.replace(b"SimpleCNN", b"SimpelCNN"),
        "10 classes": good.replace(b'\\"9\\"]', b'\\"x\\"]'),
        "not the model": good.replace(b'\\"9\\"]', b"12345]"),
        "its tensors": with_metadata(network="timm:resnet18"),
        "[9, 8]": with_metadata(img_size=[9, 8]),
        "std=[0.0]": with_metadata(std=[0.0]),
    }
    for named, content in cases.items():
        assert content != good
        model.write_bytes(content)
        capsys.readouterr()
        assert call(CLS, f"finetune.teacher={teacher}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line
    assert not (tmp_path / "run").exists()
