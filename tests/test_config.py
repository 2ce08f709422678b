"""Bad configs: one line that names the key, the value and the nearest valid choice."""

from pathlib import Path

import pytest

from finetune.config import FinetuneConfig, StartAmendment
from mae_vit.config_file import dump_config, load_config
from mae_vit.errors import InputError
from mae_vit.plan import make_plan
from pretrain.job import PretrainConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "mae_digits.yaml"

BAD = {
    "model.img_sise=8": 'unknown key "model.img_sise": did you mean "img_size"?',
    "optimizer.lr=1": 'unknown key "optimizer": did you mean "optim"?',
    "objective.mask_ration=0.5": 'unknown key "objective.mask_ration": did you mean "mask_ratio"?',
    "data.augment.flipp=true": 'unknown key "data.augment.flipp": did you mean "flip"?',
    "train.effective_batch_size=many": "train.effective_batch_size='many': input should be a valid integer",
    "data.augment.flip=no": "data.augment.flip='no': input should be a valid boolean",
    "objective.mask_ratio=1.0": "objective.mask_ratio=1.0: input should be less than 1",
    "objective.mask_ratio=0": "objective.mask_ratio=0: input should be greater than 0",
    "objective.name=may": 'objective.name="may": did you mean "mae"?',
    "model.name=tiny-cifer": 'did you mean "tiny-cifar"?',
    "model.patch_size=3": "patch_size=3 does not divide img_size=8 (nearest side that fits: 9)",
    "model.img_size=[8, 8, 8]": "give one number or [height, width]",
    "optim.blr=1e-4 optim.lr=1e-4": "give one of blr, lr, not blr and lr",
    "optim.lr=": "give one of blr, lr",
    "train.steps=5 train.epochs=5": "give one of steps, epochs, samples, not steps and epochs",
    "train.precision=fp8": "train.precision='fp8'",
    "data.augment.pad_px=2": 'pad_px has no effect with crop="none"',
    "data.augment.scale=[0.1, 0.5]": 'scale has no effect with crop="none"',
    "data.order=block": "data.order='block': input should be 'global' or 'blocks'; did you mean \"blocks\"?",
    "data.lanes=8": 'lanes has no effect with order="global"; it belongs to order="blocks"',
    "data.block_shards=8": 'block_shards has no effect with order="global"; it belongs to order="blocks"',
    "data.order=blocks data.lanes=0": "data.lanes=0: input should be greater than 0",
    "data.order=blocks data.block_shards=0": "data.block_shards=0: input should be greater than 0",
    "data.order=blocks data.lanes=10": (
        "data.lanes=10 does not divide train.effective_batch_size=128 (nearest batch: 130, nearest lanes: 8)"
    ),
    "data.order=blocks train.effective_batch_size=3": (
        "data.lanes=8 does not divide train.effective_batch_size=3 (nearest batch: 8, nearest lanes: 3)"
    ),
    "optim.betas=[0.9, 1.5]": "each needs 0 <= beta < 1",
    "optim.name=sgd": 'betas has no effect with name="sgd"; it belongs to name="adamw" or "adam"',
    "optim.momentum=0.9": 'momentum has no effect with name="adamw"; it belongs to name="sgd" or "lars"',
    "optim.nesterov=true": 'nesterov has no effect with name="adamw"; it belongs to name="sgd"',
    "optim.trust_coefficient=1": 'it belongs to name="lars"',
    "optim.name=lars optim.betas= optim.eps=1": 'eps has no effect with name="lars"',
    "optim.name=sgd optim.betas= optim.momentum=0 optim.nesterov=true": "nesterov=true has no effect with momentum=0",
    "optim.name=adamm": 'did you mean "adam',
    "optim.decay_share=0.1": 'decay_share has no effect with schedule="cosine"; it belongs to schedule="wsd"',
    "optim.schedule=wsd optim.decay_share=1.5": "optim.decay_share=1.5",
    "optim.name=lars optim.betas= train.zero_stage=1": "needs whole parameters, train.zero_stage=1 shards",
    "train.zero_stage=4": "train.zero_stage=4",
    "train.zero_stage=3 train.compile=true": "compile=true does not go with zero_stage=3",
    "train.zero_stage=2 train.engine=torch": 'zero_stage=2 needs engine="deepspeed"',
    "run.seed=-1": "run.seed=-1",
    "optim.lr=.inf": "optim.lr=inf",
    "nonsense": "write key.path=value",
    "model.name.deeper=1": "model.name is not a section",
    "train={": "not valid YAML",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_override_is_one_readable_line(override):
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, CONFIG, override.split(" ") if override.count("=") > 1 else [override])
    message = str(caught.value)
    assert BAD[override] in message, message
    assert "\n" not in message
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a config is a mapping of sections"),
        ("- a\n- b", "a config is a mapping of sections"),
        ("model: [", "not valid YAML"),
        ("model: 3", "model=3"),
        ("!!python/object/apply:os.system ['touch pwned']", "not valid YAML"),
        ("a: &x [*x]", "unknown key"),
        ("train: {epochs: 3, epochs: 4}", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("pwned").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.yaml: no such file"):
        load_config(PretrainConfig, tmp_path / "nothing.yaml")


def test_an_override_takes_the_place_of_the_files_way():
    config = load_config(
        PretrainConfig, CONFIG, ["train.steps=5", "optim.blr=1e-4", "train.warmup_samples=7"]
    )
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert (config.optim.blr, config.optim.lr) == (1e-4, None)
    assert (config.train.warmup_samples, config.train.warmup_epochs) == (7, None)


def test_yaml_1_2_numbers_and_words(tmp_path):
    config = load_config(PretrainConfig, CONFIG, ["optim.lr=1e-3", "run.name=no", "data.path=on"])
    assert config.optim.lr == 1e-3
    assert config.run.name == "no"
    assert config.data.path == "on"


def test_dump_reads_back_the_same(tmp_path):
    config = load_config(PretrainConfig, CONFIG, ["model.img_size=[8, 16]", "data.normalize=[[0.5], [0.2]]"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(PretrainConfig, path) == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_say_how_to_use_them(path):
    if "\nfinetune:" in path.read_text():
        load_config(FinetuneConfig, path, amend=StartAmendment(None, path.stem))
    else:
        load_config(PretrainConfig, path)
    header = path.read_text().split("\n\n")[0]
    for word in ("Command:", "Hardware:", "Time:", "Result:", "Follows:"):
        assert word in header, f"{path.name} lacks {word}"


def test_options_of_blocks_have_values_only_there():
    data = load_config(PretrainConfig, CONFIG).data
    assert (data.order, data.lanes, data.block_shards) == ("global", None, None)
    data = load_config(PretrainConfig, CONFIG, ["data.order=blocks", "data.block_shards=2"]).data
    assert (data.order, data.lanes, data.block_shards) == ("blocks", 8, 2)


def plan(*overrides: str, num_samples: int = 1534, world_size: int = 1):
    return make_plan(
        load_config(PretrainConfig, CONFIG, overrides), num_samples=num_samples, world_size=world_size
    )


def test_durations_become_steps():
    assert plan("train.epochs=30").total_steps == 30 * 11
    assert plan("train.warmup_epochs=0", "train.steps=70").total_steps == 70
    assert plan("train.warmup_epochs=0", "train.samples=1281").total_steps == 11
    assert plan("train.warmup_epochs=2").warmup_steps == 22
    assert plan("train.warmup_steps=5").warmup_steps == 5
    assert plan("train.warmup_samples=129").warmup_steps == 2
    assert plan("checkpoint.every_steps=7").checkpoint_every_steps == 7
    assert plan("monitor.evaluate_every_epochs=2").evaluate_every_steps == 22


def test_base_rate_is_per_256_samples():
    assert plan("optim.blr=1.5e-4", "train.effective_batch_size=512").lr == pytest.approx(3e-4)


def test_batches_are_split_over_ranks_and_micro_batches():
    found = plan("train.batch_size_per_device=16", world_size=2)
    assert (found.batch_size_per_device, found.accumulation) == (16, 4)
    assert plan(world_size=4).batch_size_per_device == 32


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 32])
def test_lanes_fit_ranks_that_divide_them_or_are_divided(world_size):
    assert plan("data.order=blocks", world_size=world_size).effective_batch_size == 128


def test_each_optimizer_and_schedule_has_its_own_defaults():
    def optim(*overrides: str):
        return load_config(PretrainConfig, CONFIG, ["optim.betas=", "optim.weight_decay=", *overrides]).optim

    assert (optim().betas, optim().weight_decay) == ([0.9, 0.95], 0.05)
    assert optim("optim.name=adam").own_options == {"betas": [0.9, 0.999], "eps": 1e-8}
    assert optim("optim.name=sgd").own_options == {"momentum": 0.9, "nesterov": False}
    lars = optim("optim.name=lars", "optim.momentum=0.5")
    assert lars.own_options == {"momentum": 0.5, "trust_coefficient": 0.001}
    assert lars.weight_decay == 0
    assert (lars.betas, lars.eps, lars.nesterov, lars.decay_share) == (None, None, None, None)
    assert optim("optim.schedule=wsd").decay_share == 0.2


def test_the_decay_is_a_share_of_the_run():
    assert plan("train.steps=70", "train.warmup_epochs=0").decay_steps == 0
    assert plan("train.steps=70", "train.warmup_epochs=0", "optim.schedule=wsd").decay_steps == 14


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 3, "train.effective_batch_size=128 does not divide over 3 ranks (nearest: 129)"),
        (
            ["train.batch_size_per_device=48"],
            1,
            "does not divide the 128 images of each of 1 ranks (nearest: 32)",
        ),
        (
            ["data.order=blocks", "train.effective_batch_size=96"],
            6,
            "data.lanes=8 does not fit 6 ranks: one must divide the other (nearest lanes: 6, or use 4 ranks)",
        ),
        (["train.effective_batch_size=2000"], 1, "larger than the data"),
        (["train.warmup_epochs=31"], 1, "warm-up of 341 steps is longer than the run of 330 steps"),
        (["train.epochs=0.01", "train.warmup_epochs=0"], 1, "less than one step"),
        (["optim.min_lr=0.5"], 1, "optim.min_lr=0.5 is above the peak rate optim.lr=0.001"),
        (
            ["optim.blr=1e-4", "optim.min_lr=6e-5"],
            1,
            "optim.min_lr=6e-05 is above the peak rate 5e-05 = optim.blr=0.0001 x 128 / 256",
        ),
        (
            ["train.steps=10", "train.warmup_steps=6", "optim.schedule=wsd", "optim.decay_share=0.5"],
            1,
            "warm-up of 6 steps and decay of 5 steps (optim.decay_share=0.5) are longer than the run of 10 steps",
        ),
    ],
)
def test_impossible_plans(overrides, world_size, expected):
    with pytest.raises(InputError) as caught:
        plan(*overrides, world_size=world_size)
    assert expected in str(caught.value)
