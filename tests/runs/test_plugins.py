"""Encoders, objectives and trackers of the user's own: pretrained, resumed and fine-tuned from their files."""

import json
import pickle
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ROOT, cut_back, lines_of, run, summary_of

from mae_vit.config.data import POLICIES
from mae_vit.config.encoders import ENCODERS
from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.batches.sources import decode_sample
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import SOURCES
from mae_vit.objectives import OBJECTIVES
from mae_vit.testing import assert_encoder_contract, assert_objective_contract

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "extending.md"
SHORT = ["train.warmup_steps=1", "train.warmup_epochs=null", "train.effective_batch_size=32"]
SHORT += ["monitor.tensorboard=false", "monitor.probe_queries=0", "train.engine=torch"]


def command(script: str, *arguments: str, expect: int = 0) -> str:
    done = run(script, *arguments)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def page_command(job: str, folder, digits) -> list[str]:
    """The words of docs/extending.md that train with plug-ins, here with copies of the examples."""
    page = PAGE.read_text().replace("\\\n", "")
    (line,) = re.findall(rf"^mae-vit {job} .*examples/mixer.py.*$", page, re.M)
    line = line.replace("examples/", f"{folder}/").replace("runs/simmim_digits", f"{folder}/run")
    return ["-m", "mae_vit.cli", *shlex.split(line)[1:], f"data.path={digits}"]


def test_all_examples_together_pretrain_resume_and_are_fine_tuned(digits, tmp_path, said):
    names = ("mixer.py", "upside_down.py", "csv_tracker.py")
    for name in names:
        shutil.copy(EXAMPLES / name, tmp_path)
    folder, tracker = tmp_path / "run", f",{tmp_path}/csv_tracker.py]"
    pretrain = [word.replace("]", tracker) for word in page_command("pretrain", tmp_path, digits)]
    pretrain += ["model.depth=2", "monitor.trackers=[csv]", "monitor.log_every_steps=1"]
    pretrain += [*SHORT, f"run.dir={folder}", "checkpoint.every_steps=2", "checkpoint.every_epochs=null"]
    told = command(*pretrain, "train.steps=2", "train.epochs=null")
    assert "accuracy" in told
    told = command(*pretrain, "train.steps=4", "train.epochs=null", "--extend")
    assert "step 2 of 4" in told
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    assert [int(step) for step, name, _ in rows if name == "train/loss"] == [1, 2, 3, 4]
    # What lies in a run folder imports nothing, unless the command names it.
    replay = ["-m", "mae_vit.cli", "replay", str(folder), "--step", "1"]
    assert "mixer.py" in command(*replay, expect=2)
    named = [word for name in names for word in ("--plugin", str(tmp_path / name))]
    command(*replay, *named)
    # Another source is another run, unless that is allowed.
    (tmp_path / "upside_down.py").open("a").write("# changed\n")
    refused = command(*pretrain, "train.steps=6", "train.epochs=null", "--extend", expect=2)
    assert "upside_down.py" in refused
    assert "mixer.py" not in refused
    assert "run.plugins_may_change" in refused
    changed = [*pretrain, "train.epochs=null", "--extend", "run.plugins_may_change=true"]
    command(*changed, "train.steps=6")
    source = (tmp_path / "upside_down.py").read_text()
    (tmp_path / "upside_down.py").write_text(
        source.replace(
            "self.head.apply", "self.register_buffer('more', torch.zeros(2))\n        self.head.apply"
        )
    )
    config = (folder / "config.yaml").read_text()
    assert "differ in more" in command(*changed, "train.steps=7", expect=2)
    assert (folder / "config.yaml").read_text() == config
    (tmp_path / "upside_down.py").write_text(source)
    finetune = page_command("finetune", tmp_path, digits)
    tuned = tmp_path / "tuned"
    short = [*SHORT[:4], "train.steps=2", "train.epochs=null", "data.labels_per_class=10", f"run.dir={tuned}"]
    told = command(*finetune, *short, "optim.layer_decay=0.8")
    assert "100.0%" in told
    assert "\nlr " in told, "the plugin's encoder has layers"
    check_commands_on_its_runs(folder, tuned, finetune, digits, said)


def check_commands_on_its_runs(folder, tuned, finetune, digits, said):
    """Each command names the missing plug-in, then runs with it: all in one process, which imports torch once."""
    words = finetune[2:]
    size = words.index("model.img_size=8")
    embed = ["embed", str(folder), str(digits), "--split", "test"]
    predict = ["predict", str(tuned), str(digits), "--split", "test"]
    export = ["export", str(folder), "--to", "torch"]
    inspect = ["inspect", str(folder), "--images", "4"]
    commands = [[*embed, f"--out={tuned}.e"], [*predict, f"--out={tuned}.csv"], export, inspect]
    encoder = [*embed[:1], str(folder / "encoder.safetensors"), *embed[2:], f"--out={tuned}.e"]
    plugin = ["--plugin", str(folder.with_name("mixer.py"))]
    lines = [
        *commands,
        encoder,
        [word for word in words if "finetune_cifar_tiny" not in word and word != "--config"],
    ]
    lines += [[*words[:size], *words[size + 1 :]], *([*line, *plugin] for line in commands)]
    code = "import sys, json; from mae_vit.cli.main import main; print([*map(main, json.loads(sys.argv[1]))])"
    done = run("-c", code, json.dumps(lines))
    # Exports and inspections are of Vision Transformers.
    assert done.stdout.splitlines()[-1] == str([2] * 7 + [0, 0, 2, 2]), done.stdout + done.stderr
    for line in dict.fromkeys(line for line in done.stderr.splitlines() if "error: " in line):
        said(line)


def test_a_policy_of_ones_own_changes_the_images_that_the_key_draws(digits, tmp_path):
    pretrain = ["pretrain/run.py", "--config", "configs/pretrain/mae_digits.yaml", f"data.path={digits}"]
    pretrain += [*SHORT, "train.steps=2", "train.epochs=null", "data.augment.policy=solarize"]
    plugin = f"run.plugins=[{EXAMPLES}/solarize.py]"
    losses = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        command(*pretrain, plugin, f"run.dir={folder}", "data.source=tar", f"data.workers={workers}")
        losses.append([line["loss"] for line in lines_of(folder) if "loss" in line])
    assert losses[0] == losses[1]
    command(*pretrain, "run.dir=nowhere", "--dry-run", expect=2)


def test_data_of_ones_own_are_pretrained_on_resumed_and_fine_tuned_on(tmp_path):
    plugin = [f"run.plugins=[{EXAMPLES}/shapes.py]", "data.path=shapes", "data.workers=2"]
    pretrain = ["pretrain/run.py", "--config", "configs/pretrain/mae_digits.yaml", *plugin, *SHORT]
    pretrain += ["train.epochs=null", "checkpoint.every_steps=2", "checkpoint.every_epochs=null"]
    losses = {}
    for name, source, steps in (("whole", "tar", [4]), ("resumed", "memory", [2, 4])):
        for number in steps:
            extend = ["--extend"] if number != steps[0] else []
            place = [f"run.dir={tmp_path / name}", f"data.source={source}"]
            command(*pretrain, *place, f"train.steps={number}", *extend)
        lines = lines_of(tmp_path / name)
        losses[name] = {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}
    assert losses["whole"][4] == losses["resumed"][4]
    finetune = ["finetune/run.py", "--config", "configs/finetune/finetune_cifar_tiny.yaml"]
    finetune += ["--ckpt", str(tmp_path / "whole"), *plugin, *SHORT[:4], "train.steps=2", "train.epochs=null"]
    finetune += ["data.labels_per_class=20", "data.augment.crop=none", "model.img_size=8"]
    said = command(*finetune, f"run.dir={tmp_path / 'finetuned'}")
    assert summary_of(tmp_path / "finetuned")["test_size"] == 200, said
    weights = str(tmp_path / "whole")
    command(
        "finetune/run.py", "--ckpt", weights, *plugin[:2], f"run.dir={tmp_path / 'foreseen'}", "--dry-run"
    )
    said = command("-m", "mae_vit.cli", "replay", weights, "--step", "2", expect=2)
    assert "its plug-in" in said
    features = ["--plugin", f"{EXAMPLES}/shapes.py", "--out", str(tmp_path / "features")]
    command("-m", "mae_vit.cli", "embed", weights, "shapes", *features)


def test_dropout_of_ones_own_draws_the_same_after_a_stop(digits, tmp_path):
    head = "nn.Linear(encoder.embed_dim, 2)"
    source = (EXAMPLES / "upside_down.py").read_text()
    (tmp_path / "noisy.py").write_text(source.replace(head, f"nn.Sequential(nn.Dropout(0.5), {head})"))
    pretrain = [
        "pretrain/run.py",
        "--config",
        "configs/pretrain/mae_digits.yaml",
        f"data.path={digits}",
        *SHORT,
    ]
    pretrain += [
        f"run.plugins=[{tmp_path}/noisy.py]",
        "objective={name: upside_down}",
        f"run.dir={tmp_path}/run",
    ]
    pretrain += [
        "train.steps=4",
        "train.epochs=null",
        "checkpoint.every_steps=2",
        "checkpoint.every_epochs=null",
    ]
    command(*pretrain)
    whole = (tmp_path / "run" / "encoder.safetensors").read_bytes()
    cut_back(tmp_path / "run", 2)
    assert "step 2" in command(*pretrain)
    assert (tmp_path / "run" / "encoder.safetensors").read_bytes() == whole


def test_the_examples_keep_the_contracts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    __import__("mixer"), __import__("upside_down")
    mixer = {"family": "mixer", "name": "mixer", "img_size": 8, "in_chans": 1, "depth": 1}
    assert_encoder_contract(mixer)
    assert_objective_contract({"name": "simmim"}, mixer)
    assert_objective_contract({"name": "upside_down"}, mixer)
    # A sum may be a vector.
    turned = __import__("upside_down").UpsideDown
    sums = turned.evaluation_sums
    columns = lambda self, batch: {**sums(self, batch), "x": self.unit(batch.images).sum((0, 1, 2))}  # noqa: E731
    monkeypatch.setattr(turned, "evaluation_sums", columns)
    assert_objective_contract({"name": "upside_down"}, mixer)
    solarize, shapes = __import__("solarize").Solarize(probability=0.5), __import__("shapes")
    assert 0 < sum(solarize.draw(ViewKeys(0, 0, np.arange(100)))) < 100
    assert (solarize.apply(np.full((1, 2, 2), 200, np.uint8), True, None) == 55).all()
    index = open_index(Path("shapes"), "test")
    assert index.labels.tolist() == [0, 1] * 100
    image = decode_sample(pickle.loads(pickle.dumps(index)), 7, 1)
    np.testing.assert_array_equal(image, shapes.Shapes(1000, 200).read(7))
    # Other tests go through these.
    del ENCODERS["mixer"], OBJECTIVES["upside_down"], POLICIES["solarize"], SOURCES["shapes"]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *(("mine", None), ("mine", "import nothing_of_this_name"), ("mine", "\n1 / 0\n")),
        *(("mine", "raise SystemExit(0)"), ("statistics", ""), ("so.lar", "")),
    ],
)
def test_a_plugin_that_fails_is_one_line(tmp_path, name, source, said):
    path = tmp_path / f"{name}.py"
    if source is not None:
        path.write_text(source)
    config = "configs/pretrain/mae_digits.yaml"
    out = command("pretrain/run.py", "--config", config, f"run.plugins=[{path}]", "--dry-run", expect=2)
    (line,) = [line for line in out.splitlines() if "error" in line]
    said(line)
