"""What an override replaces: a value of the file, another way of giving it, and options that then have no effect."""

import pytest
from helpers.commands import ROOT

from mae_vit.config.keys import key_paths
from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"


def test_an_override_takes_the_place_of_the_files_way_with_a_note():
    notes = []
    words = ["train.steps=5", "optim.blr=1e-4", "train.warmup_samples=7"]
    config = load_config(PretrainConfig, CONFIG, words, notes=notes)
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert (config.optim.blr, config.optim.lr) == (1e-4, None)
    assert (config.train.warmup_samples, config.train.warmup_epochs) == (7, None)
    assert len(notes) == 2
    assert "train.steps=5" in notes[0]
    assert "train.warmup_epochs=16" in notes[1]
    # Another value of the same key is what an override is for, and so is null.
    same = []
    load_config(PretrainConfig, CONFIG, ["train.epochs=5", "train.warmup_epochs=null"], notes=same)
    assert same == []


KEYS = set(key_paths(PretrainConfig, {}))
DURATIONS = sorted(key for key in KEYS if key.endswith("steps") and f"{key[:-5]}epochs" in KEYS)
assert "train.warmup_steps" in DURATIONS


@pytest.mark.parametrize(
    ("override", "section", "gone"),
    [
        ("optim.name=sgd", "optim", ["betas"]),
        ("data.augment.crop=none", "data.augment", ["scale", "ratio"]),
        ("data.augment.policy=none", "data.augment", ["num_ops", "magnitude"]),
    ],
)
def test_another_choice_takes_the_place_of_the_files_options(write_config, override, section, gone):
    augment = {"crop": "random_resized", "scale": [0.3, 1.0], "policy": "randaugment", "num_ops": 3}
    path = write_config(
        optim={"betas": [0.9, 0.95]},
        data={"order": "blocks", "lanes": 4, "block_shards": 2, "augment": augment},
    )
    chosen = load_config(PretrainConfig, path, [override])
    for part in section.split("."):
        chosen = getattr(chosen, part)
    assert [getattr(chosen, name) for name in gone] == [
        type(chosen).model_fields[name].get_default(call_default_factory=True) for name in gone
    ]
    # What the command line itself gives is not dropped.
    with pytest.raises(InputError, match="command line"):
        load_config(PretrainConfig, path, [override, f"{section}.{gone[0]}=3"])


@pytest.mark.parametrize("in_steps", DURATIONS)
def test_any_duration_in_epochs_is_changed_to_steps_by_an_override(write_config, in_steps):
    section, _, name = in_steps.partition(".")
    path = write_config(**{section: {name.removesuffix("steps") + "epochs": 2}})
    config = load_config(PretrainConfig, path, [f"{in_steps}=3"])
    assert getattr(getattr(config, section), name) == 3


def test_null_unsets_a_key(write_config):
    path = write_config(optim={"clip_grad": 3.0, "weight_decay": 0.3})
    config = load_config(
        PretrainConfig,
        path,
        ["optim.clip_grad=null", "optim.weight_decay=null", "train.warmup_epochs=null", "run.seed=null"],
    )
    assert config.optim.clip_grad is None
    assert config.optim.weight_decay == 0.05
    assert config.train.warmup_epochs is None
    assert config.run.seed == 0
    assert load_config(PretrainConfig, path, ["run.name=null"]).run.name == "mae_mine"
    # Unsetting one way of giving a thing leaves the other.
    assert load_config(PretrainConfig, path, ["optim.blr=null"]).optim.lr == 1e-3
