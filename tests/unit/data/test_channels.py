"""`model.in_chans` is the data's, unless a config says otherwise."""

from types import SimpleNamespace

import pytest
from helpers.commands import ROOT

from mae_vit.config.load import load_config
from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.data.data_path import with_channels
from mae_vit.objectives.pretrain_config import PretrainConfig


def config_of(*overrides: str) -> PretrainConfig:
    return load_config(PretrainConfig, ROOT / "configs" / "pretrain" / "mae_satellite.yaml", list(overrides))


def data_of(channels: int, *, bands: bool) -> SimpleNamespace:
    names = tuple(f"B{number}" for number in range(channels))
    ones = (1.0,) * channels
    return SimpleNamespace(
        channels=channels, bands=Bands(names, "uint16", (0.0,) * channels, ones) if bands else RGB8
    )


@pytest.mark.parametrize(("channels", "bands"), [(13, True), (1, True), (1, False), (3, False)])
def test_it_is_the_datas(channels, bands):
    config = config_of()
    assert config.model.in_chans is None
    assert with_channels(config, data_of(channels, bands=bands)).model.in_chans == channels


def test_photographs_may_be_read_as_gray_or_rgb():
    config = config_of("model.in_chans=3")
    assert with_channels(config, data_of(1, bands=False)) is config


@pytest.mark.parametrize(("asked", "channels", "bands"), [(3, 13, True), (4, 3, False)])
def test_a_contradiction_is_one_line(asked, channels, bands, said):
    with pytest.raises(InputError) as found:
        with_channels(config_of(f"model.in_chans={asked}"), data_of(channels, bands=bands))
    said(found)
