"""A config that a test changes."""

from pathlib import Path

import pytest
from helpers.commands import ROOT
from ruamel.yaml import YAML


@pytest.fixture
def write_config(tmp_path):
    """Writes a changed copy of the digits' config: write_config(train={...}) -> path."""

    def write(**sections) -> Path:
        yaml = YAML(typ="safe", pure=True)
        yaml.sort_base_mapping_type_on_output = False
        raw = yaml.load((ROOT / "configs" / "pretrain" / "mae_digits.yaml").read_text())
        for name, values in sections.items():
            raw[name] = {**raw.get(name, {}), **values}
        path = tmp_path / "mae_mine.yaml"
        yaml.dump(raw, path)
        return path

    return write
