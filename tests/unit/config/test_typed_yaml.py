"""Values are read by the type of their key: text as it is written, paths expanded, YAML for the rest."""

import pytest
from helpers.commands import ROOT

from mae_vit.comparison.config import CompareConfig, override_words
from mae_vit.config.load import ConfigValues, load_config
from mae_vit.config.typed_yaml import parse_value, parse_yaml, write_value
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"
AS_TYPED = [
    "photos/batch #2",
    "2024",
    "a: b",
    "true",
    "*",
    '"a"b"',
    "😀/é",
]


@pytest.mark.parametrize("text", AS_TYPED)
def test_text_on_the_command_line_is_the_text_and_what_is_written_is_read_again(text):
    assert load_config(PretrainConfig, CONFIG, [f"data.path={text}"]).data.path == text
    (line,) = override_words({"data.path": text})
    assert parse_value(FinetuneConfig, "data.path", line.partition("=")[2], "") == text
    assert parse_yaml(write_value({"a": [text]}), "") == {"a": [text]}


@pytest.mark.parametrize("name", ["007", "2026-11-26", "true"])
def test_a_name_may_look_like_anything(name, write_config):
    assert load_config(PretrainConfig, CONFIG, [f"run.name={name}"]).run.name == name
    path = write_config(run={"name": "it-is-here"})
    path.write_text(path.read_text().replace("it-is-here", name))
    assert load_config(PretrainConfig, path).run.name == name


def test_null_is_no_text_but_in_quotes():
    config = load_config(PretrainConfig, CONFIG, ["model.init=null", "data.split='null'"])
    assert (config.model.init, config.data.split) == (None, "null")


def test_other_types_are_yaml():
    words = ["train.epochs=1e1", "optim.betas=[0.9, 0.8] # as in"]
    config = load_config(PretrainConfig, CONFIG, [*words, "data.augment.flip=false", "data.workers=auto"])
    assert (config.train.epochs, config.optim.betas) == (10, [0.9, 0.8])
    assert (config.data.augment.flip, config.data.workers) == (False, "auto")


def test_a_path_is_expanded_wherever_it_is_given(monkeypatch, write_config):
    monkeypatch.setenv("HOME", "/home/of me")
    monkeypatch.setenv("DATA", "/data")
    typed = load_config(PretrainConfig, CONFIG, ["data.path=~/x", "run.dir=$DATA/${HOME}", "model.init=~"])
    assert (typed.data.path, typed.run.dir) == ("/home/of me/x", "/data//home/of me")
    assert typed.model.init == "/home/of me"
    assert load_config(PretrainConfig, write_config(data={"path": "$DATA/y"})).data.path == "/data/y"
    assert load_config(PretrainConfig, CONFIG, ["data.path=s3://b/$DATA"]).data.path == "s3://b/$DATA"
    # The name of a split is no path.
    assert load_config(PretrainConfig, CONFIG, ["data.split=~x"]).data.split == "~x"


def test_a_variable_that_is_not_set_is_one_line(monkeypatch, write_config):
    monkeypatch.delenv("NONE", raising=False)
    with pytest.raises(InputError, match=r"^override .*: .*\$NONE"):
        load_config(PretrainConfig, CONFIG, ["data.path=$NONE/x"])
    with pytest.raises(InputError, match=r"yaml: .*\$NONE"):
        load_config(PretrainConfig, write_config(data={"path": "$NONE/x"}))


def test_settings_of_a_comparison_are_typed_as_those_of_its_runs(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = """
run: {name: 2026-11-26}
data: {path: ~/data}
set: {data.split: 007, train.epochs: 1e1}
pretrain:
  2024.b: {config: ~/mae.yaml, dir: ~/mae, set: {data.path: ~/more, data.split: 1e3}}
entries:
  - {name: 1e3, config: ~/a.yaml, start: 2024.b, set: {data.cache_dir: ~/cache}, tune: [{data.split: 1_0}]}
tune: [{train.epochs: 2}]
reference: 1e3
"""
    words = ["pretrain.MAE.config=b #2.yaml", "pretrain.MAE.set.data.path=~/c", "set.data.augment.crop=none"]
    config = load_config(CompareConfig, ConfigValues(text), words)
    assert (config.run.name, config.data.path, config.reference) == ("2026-11-26", "/home/me/data", "1e3")
    assert config.set == {"data.split": "007", "train.epochs": 10.0, "data.augment.crop": "none"}
    first = config.pretrain["2024.b"]
    assert (first.config, first.dir) == ("/home/me/mae.yaml", "/home/me/mae")
    assert first.set == {"data.path": "/home/me/more", "data.split": "1e3"}
    assert config.pretrain["MAE"].config == "b #2.yaml"
    assert config.pretrain["MAE"].set == {"data.path": "/home/me/c"}
    (entry,) = config.entries
    assert (entry.name, entry.config, entry.start) == ("1e3", "/home/me/a.yaml", "2024.b")
    assert (entry.set, entry.tune) == ({"data.cache_dir": "/home/me/cache"}, [{"data.split": "1_0"}])


def test_aliases_end():
    laughs = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))
    assert len(parse_yaml(f"a0: &a0 [x]\n{laughs}", "", PretrainConfig)) == 20


def test_an_alias_is_read_by_the_type_of_each_of_its_keys():
    values = parse_yaml(
        "run: {name: &a 7, seed: *a}\ntrain: {epochs: &b 3}\nmodel: {init: *b}", "", PretrainConfig
    )
    assert values == {"run": {"name": "7", "seed": 7}, "train": {"epochs": 3}, "model": {"init": "3"}}


@pytest.mark.parametrize("text", ["None", "none", '""'])
def test_a_path_of_none_is_null(text):
    for read in (
        lambda: load_config(PretrainConfig, CONFIG, [f"model.init={text}"]),
        lambda: parse_yaml(f"model: {{init: {text}}}", "a.yaml", PretrainConfig),
    ):
        with pytest.raises(InputError, match="write null"):
            read()
