"""What every augmentation policy promises; a new entry of `POLICIES` is tested without new tests."""

import random

import numpy as np
import pytest
import torch
from helpers.images import smooth

from mae_vit.config.data import POLICIES, AugmentSection
from mae_vit.data.images.augment import Augment
from mae_vit.data.views import make_policy

INDEX = np.arange(1000, 1064)
FILL = (120, 60, 30)


@pytest.fixture(params=[name for name, built_by in POLICIES.items() if built_by])
def policy(request):
    return make_policy(AugmentSection(policy=request.param))


def views_of(policy, images: np.ndarray, index=INDEX, seed: int = 3, epoch: int = 5, **options) -> np.ndarray:
    augment = Augment(img_size=images.shape[2:], policy=policy, fill=FILL[: images.shape[1]], **options)
    return augment.apply(images, augment.draw(seed, epoch, index))


def test_the_config_takes_every_policy_and_its_options():
    assert set(AugmentSection.options["policy"]) <= set(POLICIES)


BOX = {"crop": "random_resized", "scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}


@pytest.mark.parametrize("options", [{}, {**BOX, "flip": True, "erasing": 0.5}], ids=["alone", "with others"])
def test_a_view_depends_on_the_key_alone(policy, options):
    images, others = smooth(3, 24, 32, count=len(INDEX)), np.random.default_rng(0).permutation(len(INDEX))[:9]
    views = views_of(policy, images, **options)
    np.testing.assert_array_equal(views_of(policy, images[others], INDEX[others], **options), views[others])
    for seed, epoch in ((4, 5), (3, 6)):
        assert (views_of(policy, images, seed=seed, epoch=epoch, **options) != views).any()


def test_no_generator_is_read_or_moved(policy):
    images, views = smooth(3, 24, 32, count=len(INDEX)), []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        views.append(views_of(policy, images))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        assert before == after
    np.testing.assert_array_equal(*views)
