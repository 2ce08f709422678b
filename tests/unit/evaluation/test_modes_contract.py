"""The modes of fine-tuning, and the options that each takes."""

from typing import get_args

from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.schema import FinetuneSection


def test_the_config_takes_every_mode_and_its_options():
    assert set(MODES) == set(get_args(ModeName))
    assert {key for mode in MODES.values() for key in mode.options} <= set(FinetuneSection.model_fields)
