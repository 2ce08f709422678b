"""What every objective and every encoder promises; a new line in a dictionary is tested without new tests."""

import pytest
from helpers.objectives import ENCODERS, VARIANTS, model_of, options_of, section_of, takes

from mae_vit.objectives import OBJECTIVES
from mae_vit.testing import assert_encoder_contract, assert_objective_contract

# SimMIM with every encoder, other objectives with two that they take, each variant with another one.
PAIRS = []
for number, name in enumerate([*OBJECTIVES, *VARIANTS]):
    able = [encoder for encoder in ENCODERS if takes(name, encoder)]
    cheap = [encoder for encoder in able if "timm" not in encoder]
    two = {cheap[number % len(cheap)], cheap[(number + 3) % len(cheap)]} if name in OBJECTIVES else {cheap[1]}
    chosen = able if name == "simmim" else two
    PAIRS += [(name, encoder) for encoder in sorted(chosen)]


def test_every_objective_and_encoder_is_in_a_pair():
    assert {name for name, _ in PAIRS} == {*OBJECTIVES, *VARIANTS}
    assert {encoder for _, encoder in PAIRS} == {*ENCODERS}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_keeps_its_promises(encoder):
    assert_encoder_contract(model_of(encoder))


@pytest.mark.parametrize(("name", "encoder"), PAIRS)
def test_every_objective_keeps_its_promises(name, encoder):
    assert_objective_contract(options_of(name), model_of(encoder))


@pytest.mark.parametrize("name", ["mae", "contrastive_mae", "masked_patch", "joint", "supervised"])
def test_what_an_encoder_cannot_do_is_said(name):
    with pytest.raises(ValueError, match=r"SmallResNet.*(simmim|pool=mean)"):
        OBJECTIVES[name].model_validate({"name": name}).check_encoder(section_of("convolutions"))
