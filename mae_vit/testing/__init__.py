"""What encoders and objectives promise, as checks for the tests of those who write one.

import mixer  # registers the encoder
from mae_vit.testing import assert_encoder_contract

def test_my_encoder():
    assert_encoder_contract({"family": "mixer", "name": "mixer", "img_size": 16})
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from mae_vit.config.encoders import ENCODERS, EncoderSection, family_of
from mae_vit.config.section import Section
from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.geometry import geometry_from
from mae_vit.models.patches import patchify, unpatchify
from mae_vit.objectives import OBJECTIVES, ObjectiveSection
from mae_vit.objectives.objective import Objective, as_numbers

_IMAGES, _CLASSES = 8, 5
_TOLERANCE = 1e-5
SectionType = TypeVar("SectionType", bound=Section)


def read_model(model: Mapping[str, Any]) -> EncoderSection:
    """Reads the `model` section of a config; raises AssertionError for a family that is not registered."""
    values = dict(model)
    return _registered("encoder", family_of(values), ENCODERS).model_validate(values)


def read_objective(objective: Mapping[str, Any]) -> ObjectiveSection:
    """Reads the `objective` section of a config; raises AssertionError for a name that is not registered."""
    return _registered("objective", str(objective["name"]), OBJECTIVES).model_validate(dict(objective))


def _registered(kind: str, name: str, sections: dict[str, type[SectionType]]) -> type[SectionType]:
    assert name in sections, (
        f'no {kind} "{name}" is registered: import your module first; known: {", ".join(sections)}'
    )
    return sections[name]


@contextmanager
def _names_missing_methods() -> Iterator[None]:
    try:
        yield
    except InputError as error:  # of the methods of `Encoder`
        raise AssertionError(str(error)) from None


def build_objective(
    objective: Mapping[str, Any], model: Mapping[str, Any], *, bands: Bands = RGB8
) -> Objective:
    """Builds an objective around an encoder, the same for each call; 5 classes."""
    torch.manual_seed(0)
    section = read_model(model)
    encoder, channels = section.geometry().build(), section.channels
    return read_objective(objective).build(
        encoder, mean=[0.4] * channels, std=[0.2] * channels, num_classes=_CLASSES, bands=bands
    )


def batch_for(objective: Objective, start: int = 0, stop: int = _IMAGES) -> Batch:
    """Makes images of noise for an objective of 8-bit images: a part of always the same 8, with labels and keys."""
    channels, (height, width) = objective.encoder.in_chans, objective.encoder.img_size
    generator = torch.Generator().manual_seed(0)
    shape = (_IMAGES, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    index = torch.arange(100, 100 + _IMAGES)[start:stop]
    return Batch(images[start:stop], index % _CLASSES, SampleKeys(3, 1, index))


@_names_missing_methods()
def assert_encoder_contract(model: Mapping[str, Any]) -> None:
    """Checks what fine-tuning, weights and SimMIM need of an encoder, by the `model` section of a config.

    Small images and few blocks are fastest. An AssertionError says what is broken.
    """
    section = read_model(model)
    geometry = section.geometry()
    assert geometry_from(geometry.to_dict()) == geometry, "geometry_from(to_dict()) is another geometry"
    assert read_model(geometry.to_config()).geometry() == geometry, "to_config() is another model section"
    torch.manual_seed(0)
    encoder = geometry.build().eval()
    height, width = section.image_hw
    images = torch.randn(2, section.channels, height, width)
    with torch.no_grad():
        tokens = encoder.forward_features(images)
        rows, columns = encoder.feature_grid
        shape = (2, encoder.num_prefix_tokens + rows * columns, encoder.embed_dim)
        assert tuple(tokens.shape) == shape, f"forward_features gives {tuple(tokens.shape)}, not {shape}"
        alone = encoder.forward_features(images[:1])
        assert torch.allclose(tokens[:1], alone, atol=1e-4), "an image's features depend on others in eval()"
        if section.skips_patches:
            keep = torch.arange(encoder.num_patches).flip(0).expand(2, -1)
            visible = encoder.forward_visible(images, keep)[:, encoder.num_prefix_tokens :].flip(1)
            whole = tokens[:, encoder.num_prefix_tokens :]
            assert torch.allclose(visible, whole, atol=1e-4), (
                "forward_visible of all patches is not forward_features"
            )
            half = (encoder.num_patches + 1) // 2
            kept = torch.arange(half).expand(2, -1)
            patches = patchify(images, encoder.patch_size).clone()
            patches[:, half:] = torch.randn_like(patches[:, half:])
            changed = unpatchify(patches, encoder.patch_size, encoder.img_size)
            seen, told = (encoder.forward_visible(each, kept) for each in (images, changed))
            assert torch.allclose(seen, told, atol=1e-4), (
                "forward_visible depends on patches that are left out"
            )
        if section.replaces_patches:
            replaced = encoder.forward_replaced(encoder.embed_patches(images))
            assert torch.allclose(replaced, tokens, atol=1e-4), "forward_replaced is not forward_features"
    if encoder.has_final_norm:
        assert isinstance(getattr(encoder, "norm", None), nn.Module), (
            "has_final_norm: no module is called norm"
        )
    numbers = [encoder.layer_of(name) for name, _ in encoder.named_parameters()]
    known = {number for number in numbers if number is not None}
    assert known and min(known) == 0, "layer_of: no parameter is of layer 0, which embeds the images"
    torch.manual_seed(1)
    other = geometry.build().eval()
    other.load({name: value.clone() for name, value in encoder.weights().items()})
    with torch.no_grad():
        assert torch.equal(other.forward_features(images), tokens), "load(weights()) gives other features"


@_names_missing_methods()
def assert_objective_contract(objective: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Checks what the training loop needs of an objective with an encoder, by their sections of a config.

    An AssertionError says what is broken.
    """
    read_objective(objective).check_encoder(read_model(model))
    for check in (
        _check_training,
        _check_keys,
        _check_split,
        _check_state,
        _check_evaluation,
        _check_pictures,
    ):
        check(build_objective(objective, model), read_objective(objective))


def _check_training(objective: Objective, section: ObjectiveSection) -> None:
    for _ in range(2):
        output = objective(batch_for(objective))
        assert output.loss.ndim == 0 and output.loss.dtype == torch.float32, "the loss is no float32 scalar"
        assert torch.isfinite(output.loss), "the loss is not finite"
        output.loss.backward()
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} does not learn"
            assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"
    for name, (total, count) in output.values.items():
        assert torch.isfinite(total) and count > 0 and not total.requires_grad, (
            f"value {name} is no detached sum"
        )


def _check_keys(objective: Objective, section: ObjectiveSection) -> None:
    batch = batch_for(objective)
    assert objective(batch).loss == objective(batch).loss, "the same keys give another loss"
    if objective.mask_ratio:
        other = replace(batch, keys=SampleKeys(3, 2, batch.keys.index))
        assert objective(batch).loss != objective(other).loss, "other keys give the same loss"


def _parts(section: ObjectiveSection) -> Iterator[list[tuple[int, int]]]:
    unit = section.grouping.unit if section.grouping else 1
    for size in (4, 2):
        if size % unit == 0:
            yield [(start, start + size) for start in range(0, _IMAGES, size)]


def _check_split(objective: Objective, section: ObjectiveSection) -> None:
    objective.eval()  # batch norms see the batch in training, by design
    whole = objective(batch_for(objective)).loss.item()
    for parts in _parts(section):
        mean = sum(objective(batch_for(objective, *part)).loss.item() for part in parts) / len(parts)
        assert math.isclose(mean, whole, rel_tol=_TOLERANCE), "the loss depends on the split of a batch"


def _check_state(objective: Objective, section: ObjectiveSection) -> None:
    expected = objective(batch_for(objective)).loss
    state = {name: value.clone() for name, value in objective.state_dict().items()}
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(1.0)
    assert objective(batch_for(objective)).loss != expected, "the loss does not depend on the parameters"
    objective.load_state_dict(state, strict=True)
    assert objective(batch_for(objective)).loss == expected, "a state that is loaded gives another loss"


@torch.no_grad()
def _check_evaluation(objective: Objective, section: ObjectiveSection) -> None:
    objective.eval()
    whole = objective.evaluation_sums(batch_for(objective))
    for parts in _parts(section):
        sums = [objective.evaluation_sums(batch_for(objective, *part)) for part in parts]
        for name, value in whole.items():
            added = torch.stack([part[name] for part in sums]).sum(dim=0)
            assert torch.allclose(added, value, rtol=_TOLERANCE), f"sum {name} does not add up over batches"
    metrics = objective.evaluation_metrics(as_numbers(whole))
    assert "loss" in metrics, "evaluation_metrics have no loss"
    assert all(math.isfinite(value) for value in metrics.values()), "a metric is not finite"


@torch.no_grad()
def _check_pictures(objective: Objective, section: ObjectiveSection) -> None:
    batch = batch_for(objective)
    rows = objective.pictures(batch)
    assert len({row.label for row in rows}) == len(rows), "two rows of pictures have one label"
    if objective.mask_ratio:
        begin = [row.label.split(": ")[-1].split(" ")[0] for row in rows[:3]]
        assert begin == ["masked", "predicted", "pasted"], f"pictures begin with {begin}"
    assert rows[-1].label == "original", "the last row of pictures is not the original"
    for row in rows:
        assert row.images.shape == batch.images.shape, f"pictures {row.label}: another shape"
        assert 0 <= row.images.min() <= row.images.max() <= 1, f"pictures {row.label}: not in 0..1"
    assert torch.allclose(rows[-1].images, batch.images.float() / 255), "original pictures are not the images"
