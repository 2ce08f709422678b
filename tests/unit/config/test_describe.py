"""`mae-vit config KEY`: what a key means, and who sets it."""

import pytest
from helpers.commands import one_line

from mae_vit.cli.main import main
from mae_vit.comparison.config import CompareConfig
from mae_vit.config import describe
from mae_vit.config.data import DataSection
from mae_vit.config.describe import explain_key, meanings
from mae_vit.config.keys import key_paths
from mae_vit.config.schema import OptimSection
from mae_vit.finetuning.config.schema import FinetuneConfig, FinetuneOptimSection
from mae_vit.objectives.pretrain_config import PretrainConfig

SCHEMAS = {"pretraining": PretrainConfig, "fine-tuning": FinetuneConfig, "comparing": CompareConfig}


def test_a_key_is_explained(capsys):
    assert main(["config", "optim.blr"]) == 0
    text = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in text.splitlines()[1:6])
    assert (facts["type"], facts["default"], facts["for"]) == ("number", "none", "pretraining, fine-tuning")
    assert "per 256 samples" in facts["meaning"]
    assert facts["presets"].startswith("0.00015: mae_base")


@pytest.mark.parametrize("section", [OptimSection, FinetuneOptimSection, DataSection])
def test_a_default_that_depends_on_a_choice_is_in_the_meaning(section):
    for kinds in section.options.values():
        for options in kinds.values():
            for name, default in options.items() if isinstance(options, dict) else ():
                known = (meanings(section)[name], str(section.model_fields[name].default))
                assert any(str(default) in text for text in known), (name, default)


def test_a_branch_has_its_own_default_and_presets():
    blocks = "\n".join(explain_key("objective.mask_ratio=0.9", SCHEMAS)).split("\n\n")
    (simmim,) = (block for block in blocks if "name=simmim" in block)
    assert "default  0.6" in simmim
    assert "mae_base" not in simmim


@pytest.mark.parametrize("place", ["set.", "pretrain.MAE.set.", "pretrain.MAE.", "entries.set."])
def test_a_key_may_have_its_section_of_a_comparison(place):
    for key in ("train.ema_decay", "ema_decay"):
        assert explain_key(place + key, SCHEMAS) == explain_key("ema_decay", SCHEMAS)
    (first, *_) = explain_key("pretrain.MAE.dir", SCHEMAS)
    assert first == "pretrain.NAME.dir"


def test_a_section_lists_its_keys():
    lines = explain_key("checkpoint", SCHEMAS)
    assert lines[0] == "checkpoint"
    assert [line.split()[0] for line in lines[1:4]] == ["every_steps", "every_epochs", "every_minutes"]


def test_every_key_is_explained_in_at_most_a_hundred_columns(monkeypatch):
    monkeypatch.setattr(describe, "preset_paths", list)  # sixty files for each key
    for schema in SCHEMAS.values():
        for path in key_paths(schema, {}):
            lines = explain_key(path, SCHEMAS)
            assert max(map(len, lines)) <= 100, path
            facts = {line[2:11].strip() for line in lines}
            assert "type" not in facts or "meaning" in facts, path


@pytest.mark.parametrize(
    "key",
    [
        "train.epoch",
        "optim.learning",
        "learning_rate",
        *("dropout", "num_workers", "gpu", "amp"),
        "nothing_like_it",
        "decoder",
        "pretrain.MAE.dirs",
        "pretrain.MAE.train.epochz",
    ],
)
def test_an_unknown_key_names_the_nearest(capsys, said, key):
    assert main(["config", key]) == 2
    said(one_line(capsys)[:200])
