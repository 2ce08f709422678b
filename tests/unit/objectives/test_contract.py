"""What every objective and every encoder promises; a new line in a dictionary is tested without new tests."""

import pytest
from helpers.objectives import ENCODERS, VARIANTS, model_of, options_of, section_of, takes

from mae_vit.objectives import OBJECTIVES
from mae_vit.testing import assert_encoder_contract, assert_objective_contract

# Every objective with every encoder that it takes; each variant with another one.
PAIRS = [(name, encoder) for name in OBJECTIVES for encoder in ENCODERS if takes(name, encoder)]
for number, variant in enumerate(VARIANTS):
    able = [encoder for encoder in ENCODERS if takes(variant, encoder)]
    PAIRS.append((variant, able[number % len(able)]))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_keeps_its_promises(encoder):
    assert_encoder_contract(model_of(encoder))


@pytest.mark.parametrize(("name", "encoder"), PAIRS, ids=": ".join)
def test_every_objective_keeps_its_promises(name, encoder):
    assert_objective_contract(options_of(name), model_of(encoder))


@pytest.mark.parametrize("name", ["mae", "contrastive_mae", "masked_patch", "joint", "supervised"])
def test_what_an_encoder_cannot_do_is_said(name):
    with pytest.raises(ValueError, match=r"SmallResNet.*(simmim|pool=mean)"):
        OBJECTIVES[name].model_validate({"name": name}).check_encoder(section_of("convolutions"))
