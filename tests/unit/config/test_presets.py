"""Configs by name: which file is meant, and what the list says."""

import pytest
from helpers.commands import ROOT

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config, find_preset, preset_paths, read_header
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig


def test_a_file_is_meant_before_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "configs" / "pretrain" / "mae_digits.yaml"
    assert find_config("mae_digits") == find_config("mae_digits.yaml") == shipped
    # A folder of that name is no config, and a path no name.
    (tmp_path / "mae_digits").mkdir()
    assert find_config("mae_digits") == shipped
    assert str(find_config("configs/pretrain/mae_digits.yaml")) == "configs/pretrain/mae_digits.yaml"
    assert (
        find_config("configs/mae_digits.yaml") == find_config(ROOT / "configs" / "mae_digits.yaml") == shipped
    )
    assert find_preset("../configs/mae_digits") is None
    (tmp_path / "mae_digits.yaml").write_text("run: {name: mine}")
    assert str(find_config("mae_digits.yaml")) == "mae_digits.yaml"
    with pytest.raises(InputError, match=r"mae_digits\.yaml"):
        find_config("mae_digits")
    (tmp_path / "mae_digits.yaml").unlink()
    (tmp_path / "mae_digits.yaml").symlink_to(shipped)
    assert find_config("mae_digits") == shipped
    with pytest.raises(InputError, match="too long"):
        load_config(PretrainConfig, find_config("x" * 300), [])


def test_every_header_says_what_command_time_and_result():
    for path in preset_paths():
        header = read_header(path)
        assert header.name == path.stem
        assert header.title
        lines = header.describe().splitlines()
        assert [line.split()[0] for line in lines[2:]] == ["command", "time", "result"]
        # No script and no path of a checkout.
        assert f" {path.stem}" in lines[2]
        assert not any(word in lines[2] for word in ("run.py", "compare.py", "configs/")), path
