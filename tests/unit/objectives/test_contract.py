"""What every objective and every encoder promises; a new line in a dictionary is tested without new tests."""

import pytest
from helpers.objectives import ENCODERS, VARIANTS, model_of, options_of, section_of, takes

from mae_vit.models.encoders.base import Encoder
from mae_vit.models.encoders.network import NetworkEncoder
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.patches import gather_patches
from mae_vit.objectives import OBJECTIVES
from mae_vit.testing import assert_encoder_contract, assert_objective_contract

# SimMIM and the contrast with every encoder, other objectives with two that they take, each variant with another one.
PAIRS = []
for number, name in enumerate([*OBJECTIVES, *VARIANTS]):
    able = [encoder for encoder in ENCODERS if takes(name, encoder)]
    cheap = [encoder for encoder in able if "timm" not in encoder]
    two = {cheap[number % len(cheap)], cheap[(number + 3) % len(cheap)]} if name in OBJECTIVES else {cheap[1]}
    chosen = able if name in ("simmim", "contrastive") else two
    PAIRS += [(name, encoder) for encoder in sorted(chosen)]


def test_every_objective_and_encoder_is_in_a_pair():
    assert {name for name, _ in PAIRS} == {*OBJECTIVES, *VARIANTS}
    assert {encoder for _, encoder in PAIRS} == {*ENCODERS}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_keeps_its_promises(encoder):
    assert_encoder_contract(model_of(encoder))


def leaking(self, images, ids_keep, visible=ViTEncoder.forward_visible):
    """The visible tokens, with the mean of the patches that are left out."""
    left_out = images.mean() - gather_patches(images, self.patch_size, ids_keep).mean()
    return visible(self, images, ids_keep) + left_out


@pytest.mark.parametrize(
    ("encoder", "attribute", "value", "model"),
    [
        (ViTEncoder, "forward_visible", leaking, model_of("tiny")),
        (ViTEncoder, "forward_visible", Encoder.forward_visible, model_of("tiny")),
        (NetworkEncoder, "has_final_norm", True, model_of("convolutions")),
        (NetworkEncoder, "family", "network", {"family": "mine", "name": "mine", "img_size": 8}),
    ],
    ids=["leak", "no method", "no norm", "not registered"],
)
def test_a_broken_encoder_is_named(encoder, attribute, value, model, monkeypatch, said):
    monkeypatch.setattr(encoder, attribute, value)
    with pytest.raises(AssertionError) as error:
        assert_encoder_contract(model)
    said(error)


@pytest.mark.parametrize(("name", "encoder"), PAIRS)
def test_every_objective_keeps_its_promises(name, encoder):
    assert_objective_contract(options_of(name), model_of(encoder))


@pytest.mark.parametrize("name", ["mae", "contrastive_mae", "masked_patch", "joint", "supervised"])
def test_what_an_encoder_cannot_do_is_said(name):
    with pytest.raises(ValueError, match=r"SmallResNet.*(simmim|pool=mean)"):
        OBJECTIVES[name].model_validate({"name": name}).check_encoder(section_of("convolutions"))
