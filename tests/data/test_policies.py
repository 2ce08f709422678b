"""Policies and erasing: as timm's and torchvision's, drawn by key alone."""

import hashlib
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from finetune.config import FinetuneConfig
from finetune.data import open_data as open_finetune_data
from mae_vit.config_file import load_config
from mae_vit.data.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.loader import load_batches, start_worker_server
from mae_vit.data.opening import choose_workers, fill_color
from mae_vit.data.order import GlobalOrder, Share
from mae_vit.data.policies import (
    AUTOAUGMENT,
    CIFAR10_POLICY,
    RANDAUGMENT,
    AutoAugmentCifar,
    RandAugment,
    make_policy,
)
from mae_vit.data.reading import open_source
from mae_vit.errors import InputError
from mae_vit.pretrain_config import PretrainConfig
from mae_vit.training.checkpoint import Checkpoint
from mae_vit.training.distributed import Ranks
from mae_vit.training.resume import check_identity, run_identity
from pretrain.data import open_data

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILL = (120, 60, 30)
LEVELS = (0.0, 0.7, 2.49, 5.0, 8.99, 9.5, 10.0)
TORCHVISION = AutoAugment(AutoAugmentPolicy.CIFAR10)
MANY = np.arange(20_000)


def smooth(channels: int, height: int = 32, width: int = 40, count: int = 1) -> np.ndarray:
    """Images with edges and with smooth parts: uint8 (count, C, H, W)."""
    rows, columns = np.mgrid[:height, :width]
    waves = [
        127 + 100 * np.sin(rows / (3 + n) + c) * np.cos(columns / (4 + c))
        for n in range(count)
        for c in range(3)
    ]
    images = np.stack(waves).reshape(count, 3, height, width)
    images[:, :, height // 4 : height // 2, width // 4 : width // 2] += 25
    return images[:, :channels].astype(np.uint8)


def sizes(images: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.array(images.shape[2:]), (len(images), 2))


def as_picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0).copy())


def as_array(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def assert_share(count: float, total: int, share: float) -> None:
    """Within five standard errors of a binomial."""
    error = math.sqrt(total * share * (1 - share))
    assert abs(count - total * share) <= 5 * error, (count, total * share)


@pytest.fixture(params=[1, -1], ids=["plus", "minus"])
def sign(request, monkeypatch) -> int:
    """A sign, and timm's generator made to give it."""
    monkeypatch.setattr(random, "random", lambda: 0.9 if request.param < 0 else 0.1)
    return request.param


def test_the_ops_are_timms_increasing_ones():
    assert list(RANDAUGMENT) == timm_ops._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize("name", RANDAUGMENT)
def test_levels_become_arguments_as_in_timm(name, sign):
    theirs = timm_ops.LEVEL_TO_ARG[name]
    for level in LEVELS:
        expected = () if theirs is None else theirs(level, {})
        assert RANDAUGMENT[name].call(name, level, sign).arguments == expected


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", RANDAUGMENT)
def test_randaugment_ops_have_timms_pixels(name, channels, sign):
    image = smooth(channels)[0]
    hparams = {
        "img_mean": FILL if channels == 3 else FILL[0],
        "interpolation": Image.Resampling.BICUBIC,
    }
    seen = set()
    for level in LEVELS:
        ours = RandAugment().apply(image, (RANDAUGMENT[name].call(name, level, sign),), FILL[:channels])
        if (name, level) == ("PosterizeIncreasing", 10.0):  # Pillow 13 refuses timm's 0 bits
            assert not ours.any()
        else:
            theirs = timm_ops.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)(as_picture(image))
            np.testing.assert_array_equal(ours, as_array(theirs))
        assert ours.dtype == np.uint8
        seen.add(ours.tobytes())
    if (name, channels) != ("ColorIncreasing", 1):  # grey has none
        assert seen != {image.tobytes()}


def test_the_table_of_autoaugment_is_torchvisions():
    assert list(CIFAR10_POLICY) == TORCHVISION.policies
    assert {op for pair in CIFAR10_POLICY for op, *_ in pair} == set(AUTOAUGMENT)


ENHANCING = ("Brightness", "Color", "Contrast", "Sharpness")
SHIFTING = ("TranslateX", "TranslateY")


@pytest.mark.parametrize("name", AUTOAUGMENT)
def test_bins_stand_for_torchvisions_magnitudes(name):
    """Theirs are float32."""
    magnitudes, signed = TORCHVISION._augmentation_space(10, (1, 1))[name]
    argument = AUTOAUGMENT[name].argument
    assert AUTOAUGMENT[name].signed == signed
    assert (argument is None) == (magnitudes.ndim == 0)
    for place, magnitude in enumerate(magnitudes.tolist() if argument else ()):
        for sign in (1, -1) if signed else (1,):
            expected = sign * magnitude + (name in ENHANCING)
            assert argument(sign * place) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 40), (3, 331, 96)])
@pytest.mark.parametrize("name", AUTOAUGMENT)
def test_autoaugment_ops_have_torchvisions_pixels(name, channels, height, width, sign):
    image, fill = smooth(channels, height, width)[0], FILL[:channels]
    for place in range(10) if height < 100 else (9,):
        call = AUTOAUGMENT[name].call(name, place, sign)
        magnitude = float(sum(call.arguments)) - (name in ENHANCING)
        if name in SHIFTING:  # theirs depends on the size
            magnitude = TORCHVISION._augmentation_space(10, (height, width))[name][0][place].item() * sign
        theirs = _apply_op(as_picture(image), name, magnitude, InterpolationMode.NEAREST, list(fill))
        np.testing.assert_array_equal(AutoAugmentCifar().apply(image, (call,), fill), as_array(theirs))


def test_randaugment_draws_uniform_ops_half_of_them_and_normal_levels():
    drawn = RandAugment(num_ops=3, magnitude=5.0, magnitude_std=0.5).draw(0, 0, MANY)
    calls = [call for of_image in drawn for call in of_image]
    total = 3 * len(MANY)
    assert_share(len(calls), total, 0.5)
    for count in Counter(call.op for call in calls).values():
        assert_share(count, total, 0.5 / len(RANDAUGMENT))
    assert {call.op for call in calls} == set(RANDAUGMENT)
    both = Counter(len(of_image) for of_image in drawn)
    for number, share in enumerate((1 / 8, 3 / 8, 3 / 8, 1 / 8)):
        assert_share(both[number], len(MANY), share)
    degrees = np.array([call.arguments[0] for call in calls if call.op == "Rotate"])
    assert_share((degrees < 0).sum(), len(degrees), 0.5)
    levels = np.abs(degrees) / 3
    assert levels.mean() == pytest.approx(5.0, abs=5 * 0.5 / math.sqrt(len(levels)))
    assert levels.std() == pytest.approx(0.5, rel=5 / math.sqrt(2 * len(levels)))
    assert_share((np.abs(levels - 5) < 0.5).sum(), len(levels), 0.6827)
    assert 2.5 < levels.min() < levels.max() < 7.5


def test_levels_are_clipped_and_constant_without_noise():
    def levels(policy: RandAugment) -> np.ndarray:
        calls = [call for of_image in policy.draw(0, 0, MANY[:4000]) for call in of_image]
        return np.abs([call.arguments[0] for call in calls if call.op == "Rotate"]) / 3

    clipped = levels(RandAugment(magnitude=9.5, magnitude_std=3.0))
    assert clipped.max() == 10
    assert (clipped == 10).mean() == pytest.approx(0.434, abs=0.15)
    assert levels(RandAugment(magnitude=0.1, magnitude_std=3.0)).min() == 0
    assert set(levels(RandAugment(magnitude=7.0, magnitude_std=0.0)).round(9)) == {7.0}


def test_autoaugment_draws_pairs_probabilities_and_signs_by_its_table():
    drawn = AutoAugmentCifar().draw(0, 0, MANY)
    counts = Counter(call.op for of_image in drawn for call in of_image)
    for name in AUTOAUGMENT:
        shares = [share / 25 for pair in CIFAR10_POLICY for op, share, _ in pair if op == name]
        error = math.sqrt(len(MANY) * sum(shares))  # an upper bound
        assert abs(counts[name] - len(MANY) * sum(shares)) < 5 * error, name
    both = sum(one * other / 25 for (_, one, _), (_, other, _) in CIFAR10_POLICY)
    assert_share(sum(len(of_image) == 2 for of_image in drawn), len(MANY), both)
    for place in (0, 1):  # each op of a pair has a sign of its own
        degrees = [
            of_image[place].arguments[0]
            for of_image in drawn
            if len(of_image) == 2 and of_image[place].op == "TranslateY"
        ]
        assert_share(sum(shift < 0 for shift in degrees), len(degrees), 0.5)
    shifts = [of_image for of_image in drawn if [call.op for call in of_image] == ["TranslateY"] * 2]
    signs = [math.copysign(1, one.arguments[0] * other.arguments[0]) for one, other in shifts]
    assert_share(signs.count(1.0), len(signs), 0.5)


ERASED = Augment(img_size=(32, 40), erasing=0.25)


def test_erased_boxes_have_the_papers_share_area_and_shape():
    boxes = ERASED.draw(0, 0, MANY, np.broadcast_to([32, 40], (len(MANY), 2))).erasing.boxes
    erased = boxes[:, 2] > 0
    assert_share(erased.sum(), len(MANY), 0.25)
    assert not boxes[~erased].any()
    top, left, height, width = boxes[erased].T
    assert (top.min(), left.min(), (top + height).max(), (left + width).max()) == (0, 0, 32, 40)
    # Sides are whole pixels: a box of 2 % is 3 to 9 of them wide.
    area = height * width / (32 * 40)
    assert 0.01 < area.min() < 0.03
    assert 0.32 < area.max() < 0.36
    assert area.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.01)
    ratio = np.log(height / width)[area > 0.1]
    assert abs(ratio).max() < math.log(1 / 0.3) + 0.2


def test_erased_boxes_follow_timms_in_distribution():
    random.seed(0)
    erase = RandomErasing(probability=1.0, mode="const", max_area=1 / 3, device="cpu")
    theirs = []
    for _ in range(4000):
        rows, columns = np.nonzero(erase(torch.ones(1, 32, 40))[0].numpy() == 0)
        theirs.append([rows.min(), columns.min(), np.ptp(rows) + 1, np.ptp(columns) + 1])
    always = Augment(img_size=(32, 40), erasing=1.0)
    ours = always.draw(0, 0, MANY[:4000], np.broadcast_to([32, 40], (4000, 2))).erasing.boxes
    assert (ours[:, 2] > 0).all()
    for one, other in zip(np.array(theirs).T, ours.T, strict=True):
        assert abs(one.mean() - other.mean()) < 0.1 * one.std()
        assert abs(one.std() - other.std()) < 0.08 * one.std()


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_change_inside_the_box_alone_and_are_uniform(channels):
    images = np.full((600, channels, 32, 40), 77, np.uint8)
    view = ERASED.draw(0, 0, MANY[:600], sizes(images))
    batch = ERASED.apply_batch(images, view)
    assert (images == 77).all()
    inside = []
    for image, (top, left, height, width) in zip(batch, view.erasing.boxes, strict=True):
        box = np.zeros((32, 40), bool)
        box[top : top + height, left : left + width] = True
        assert (image[:, ~box] == 77).all()
        inside.append(image[:, box])
    pixels = np.concatenate(inside, axis=1)
    counts = np.bincount(pixels.ravel(), minlength=256)
    expected = pixels.size / 256
    # Chi square of 255 degrees of freedom.
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
    if channels == 3:
        correlation = np.corrcoef(pixels.astype(float))
        assert np.abs(correlation - np.eye(3)).max() < 5 / math.sqrt(pixels.shape[1])
    beginnings = {part.ravel()[:20].tobytes() for part in inside if part.size}
    assert len(beginnings) == (view.erasing.boxes[:, 2] > 0).sum()
    neighbors = np.corrcoef(pixels[0, :-1].astype(float), pixels[0, 1:].astype(float))[0, 1]
    assert abs(neighbors) < 5 / math.sqrt(pixels.shape[1])


def test_an_image_of_few_pixels_may_be_too_small_to_erase():
    images = np.full((300, 1, 2, 2), 77, np.uint8)
    augment = Augment(img_size=(2, 2), erasing=1.0)
    view = augment.draw(0, 0, MANY[:300], sizes(images))
    assert 0 < (view.erasing.boxes[:, 2] > 0).mean() < 1
    augment.apply_batch(images, view)


POLICIES = {
    "randaugment": {"policy": RandAugment(), "erasing": 0.5},
    "autoaugment": {"policy": AutoAugmentCifar(), "erasing": 0.5},
    "policy alone": {"policy": RandAugment()},
    "erasing alone": {"erasing": 0.5},
}
CROPS = {
    "none": {"crop": "none"},
    "pad": {"crop": "pad", "pad_px": 4, "flip": True},
    "random_resized": {"crop": "random_resized", "scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3), "flip": True},
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("changes", POLICIES)
def test_one_by_one_in_a_batch_and_in_another_batch_are_the_same(changes, crop, channels):
    images = smooth(channels, 32, 32, count=24)
    augment = Augment(img_size=(32, 32), **CROPS[crop], **POLICIES[changes], fill=FILL[:channels])
    index = np.arange(1000, 1024)
    batch = augment.apply_batch(images, augment.draw(3, 5, index, sizes(images)))
    assert (batch.dtype, batch.shape) == (np.uint8, images.shape)
    single = augment.apply(list(images), augment.draw(3, 5, index, sizes(images)))
    np.testing.assert_array_equal(single, batch)
    others = np.random.default_rng(0).permutation(24)[:9]
    part = augment.draw(3, 5, index[others], sizes(images)[others])
    np.testing.assert_array_equal(augment.apply_batch(images[others], part), batch[others])
    plain = Augment(img_size=(32, 32), **CROPS[crop])
    without = plain.apply_batch(images, plain.draw(3, 5, index, sizes(images)))
    assert 0.3 < (batch != without).any(axis=(1, 2, 3)).mean() < 1
    for seed, epoch in ((4, 5), (3, 6)):
        other = augment.apply_batch(images, augment.draw(seed, epoch, index, sizes(images)))
        assert (other != batch).any(axis=(1, 2, 3)).mean() > 0.3


@pytest.mark.parametrize("changes", POLICIES)
def test_no_generator_is_read_or_moved(changes):
    images = smooth(3, 32, 32, count=24)
    augment = Augment(img_size=(32, 32), **POLICIES[changes])
    results = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        results.append(augment.apply_batch(images, augment.draw(0, 0, np.arange(24), sizes(images))))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        assert before == after
    np.testing.assert_array_equal(*results)


def test_draws_of_a_seed_stay_what_they_are():
    """They are part of the data format: a run that goes on takes up where it was."""
    index = np.arange(400)
    drawn = [policy.draw(7, 3, index) for policy in (RandAugment(num_ops=3), AutoAugmentCifar())]
    content = [[(op, [round(value, 4) for value in values]) for op, values in sum(d, ())] for d in drawn]
    erasing = Augment(img_size=(32, 32), erasing=0.3).draw(7, 3, index, np.full((400, 2), 32)).erasing
    images = np.zeros((400, 1, 32, 32), np.uint8)
    erasing.fill(images)
    parts = [repr(content[0]).encode(), repr(content[1]).encode(), images.tobytes()]
    digests = [hashlib.sha256(part).hexdigest()[:16] for part in parts]
    assert digests == ["d48c83b2bdacfcd3", "7b044026a3747b11", "fa01d0d6a12fa49b"]


@pytest.mark.parametrize("changes", POLICIES)
def test_both_sources_give_the_same_images(digits, changes):
    index = open_index(digits, "train")
    augment = Augment(img_size=(16, 16), **CROPS["random_resized"], **POLICIES[changes], fill=(90,))
    samples = np.array([3, 700, 41, 900, 12])
    batches = [
        open_source(index, name, channels=1, augment=augment, memory_limit_gib=1).images(7, 2, samples)
        for name in ("memory", "tar")
    ]
    np.testing.assert_array_equal(*batches)


def test_only_a_gpu_has_processes_for_policies_on_images_in_memory(digits):
    def workers(source: str, **where: bool) -> int:
        opened = open_source(index, source, channels=1, augment=Augment(img_size=(8, 8)), memory_limit_gib=1)
        return choose_workers("auto", opened, cores=4, **where)

    index = open_index(digits, "train")
    for on_gpu, policies, expected in (
        (False, False, 0),
        (False, True, 0),
        (True, False, 0),
        (True, True, 3),
    ):
        assert workers("memory", on_gpu=on_gpu, policies=policies) == expected
        assert workers("tar", on_gpu=on_gpu, policies=policies) == 3


@pytest.mark.slow
def test_workers_give_the_same_images(digits):
    start_worker_server(policies=True)
    index = open_index(digits, "train")
    augment = Augment(img_size=(16, 16), **CROPS["random_resized"], **POLICIES["randaugment"])
    source = open_source(index, "tar", channels=1, augment=augment, memory_limit_gib=1)
    order = GlobalOrder(len(index), 96, seed=0)
    runs = [
        list(load_batches(source, order, Share(), start_step=0, stop_step=4, workers=workers))
        for workers in (0, 2)
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.images, other.images)


# Of the code before there were policies: boxes and flips, pixels.
BEFORE = {
    "none": ("800c63f97e89135a", "ba558089cced6c0c"),
    "pad": ("7c33b25888002ebe", "8e602cb721622f0e"),
    "random_resized": ("b217286356a511af", None),  # of a resize by torch, whose version may change it
}


@pytest.mark.parametrize("crop", CROPS)
def test_without_policy_and_erasing_all_is_as_before(crop):
    numbers = np.arange(64 * 3 * 16 * 16, dtype=np.int64) * 2654435761 % 2**32 >> 24
    images = numbers.astype(np.uint8).reshape(64, 3, 16, 16)
    changes = {**CROPS[crop], **({"pad_px": 3} if crop == "pad" else {})}
    augment = Augment(img_size=(16, 16), **changes, policy=make_policy("none"), fill=FILL)
    view = augment.draw(7, 3, np.arange(100, 164), sizes(images))
    assert view.calls is None
    assert view.erasing is None
    drawn = view.boxes.astype("<i8").tobytes() + view.flips.tobytes()
    pixels = augment.apply_batch(images, view).tobytes()
    for content, digest in zip((drawn, pixels), BEFORE[crop], strict=True):
        assert digest in (None, hashlib.sha256(content).hexdigest()[:16])


def test_the_policy_comes_after_the_flip_and_erasing_after_the_policy():
    images = smooth(3, 32, 32, count=200)
    augment = Augment(img_size=(32, 32), flip=True, policy=RandAugment(), erasing=1.0, fill=FILL)
    view = augment.draw(0, 0, np.arange(200), sizes(images))
    batch = augment.apply_batch(images, view)
    for number in np.flatnonzero([bool(calls) for calls in view.calls])[:40]:
        image = images[number, ..., ::-1] if view.flips[number] else images[number]
        expected = augment.policy.apply(image, view.calls[number], FILL)
        top, left, height, width = view.erasing.boxes[number]
        outside = np.ones((32, 32), bool)
        outside[top : top + height, left : left + width] = False
        np.testing.assert_array_equal(batch[number][:, outside], expected[:, outside])
        # Bytes are as on an image that nothing else happened to.
        alone = Augment(img_size=(32, 32), erasing=1.0)
        noise = alone.apply_batch(images, alone.draw(0, 0, np.arange(200), sizes(images)))[number]
        np.testing.assert_array_equal(batch[number][:, ~outside], noise[:, ~outside])


def test_fill_is_the_datas_mean_as_timm_rounds_it():
    assert fill_color((0.485, 0.456, 0.406)) == (124, 116, 104)
    assert fill_color((0.5, 1.2, -0.1)) == (128, 255, 0)
    image = np.full((3, 16, 16), 200, np.uint8)
    shift = (RANDAUGMENT["TranslateXRel"].call("TranslateXRel", 10.0, 1),)
    np.testing.assert_array_equal(RandAugment().apply(image, shift, FILL)[:, 8, -1], FILL)
    np.testing.assert_array_equal(RandAugment().apply(image, shift, None)[:, 8, -1], (0, 0, 0))


def configured(schema, digits, *overrides: str):
    return load_config(
        schema, CONFIGS / "mae_digits.yaml", [f"data.path={digits}", "run.dir=none", *overrides]
    )


RANDAUGMENTED = "data.augment.policy=randaugment"
OPTIONS = [
    (),
    (RANDAUGMENTED,),
    (RANDAUGMENTED, "data.augment.num_ops=3"),
    (RANDAUGMENTED, "data.augment.magnitude=4"),
    (RANDAUGMENTED, "data.augment.magnitude_std=2"),
    (RANDAUGMENTED, "data.normalize=half"),  # another color comes in
    ("data.augment.policy=autoaugment_cifar",),
    ("data.augment.erasing=0.25",),
    ("data.augment.erasing=0.75",),
]


def test_each_option_changes_images_of_training_and_those_alone(digits):
    cpu, samples = torch.device("cpu"), np.arange(200)
    trained, held_out = set(), set()
    for overrides in OPTIONS:
        data = open_data(configured(PretrainConfig, digits, *overrides), Ranks(), cpu)
        trained.add(data.source.images(0, 0, samples).tobytes())
        held_out.add(data.held_out_source.images(0, 0, samples).tobytes())
    assert (len(trained), len(held_out)) == (len(OPTIONS), 1)


def test_fine_tuning_measures_on_plain_images(digits):
    cpu, samples = torch.device("cpu"), np.arange(100)
    trained, measured = set(), set()
    for overrides in ((), (RANDAUGMENTED,), ("data.augment.erasing=0.5",)):
        config = load_config(
            FinetuneConfig, CONFIGS / "simple_cnn_cifar.yaml", [f"data.path={digits}", *DIGITS, *overrides]
        )
        data = open_finetune_data(config, Ranks(), cpu)
        trained.add(data.source.images(0, 0, samples).tobytes())
        plain = (data.plain.images(0, 0, samples), data.open_test().images(0, 0, samples))
        measured.add(plain[0].tobytes() + plain[1].tobytes())
    assert (len(trained), len(measured)) == (3, 1)


DIGITS = ["model.img_size=8", "model.in_chans=1"]

REFUSED = {
    "data.augment.num_ops=3": 'num_ops has no effect with policy="none"; it belongs to policy="randaugment"',
    "data.augment.magnitude=3": 'magnitude has no effect with policy="none"',
    "data.augment.magnitude_std=0 data.augment.policy=autoaugment_cifar": (
        'magnitude_std has no effect with policy="autoaugment_cifar"; it belongs to policy="randaugment"'
    ),
    "data.augment.policy=randaugment data.augment.magnitude=11": "data.augment.magnitude=11: ",
    "data.augment.policy=randaugment data.augment.magnitude_std=-1": "data.augment.magnitude_std=-1: ",
    "data.augment.policy=randaugment data.augment.num_ops=0": "data.augment.num_ops=0: ",
    "data.augment.policy=randaug": 'did you mean "randaugment"?',
    "data.augment.erasing=1.5": "data.augment.erasing=1.5: ",
    "data.augment.erase=0.5": 'did you mean "data.augment.erasing"?',
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_has_no_effect_or_no_meaning_is_refused(digits, overrides):
    with pytest.raises(InputError) as caught:
        configured(PretrainConfig, digits, *overrides.split(" "))
    assert REFUSED[overrides] in str(caught.value)


def test_defaults_of_a_policy_stand_in_the_config(digits):
    section = configured(PretrainConfig, digits, RANDAUGMENTED).data.augment
    assert section.view_options["policy_options"] == {"num_ops": 2, "magnitude": 9.0, "magnitude_std": 0.5}
    assert make_policy(section.policy, **section.view_options["policy_options"]) == RandAugment()
    plain = configured(PretrainConfig, digits).data.augment
    assert (
        plain.view_options["policy_options"],
        make_policy(plain.policy, **plain.view_options["policy_options"]),
    ) == ({}, None)


def test_a_run_from_before_there_were_policies_goes_on(digits, tmp_path):
    new = ["policy", "num_ops", "magnitude", "magnitude_std", "erasing"]
    now = run_identity(configured(PretrainConfig, digits), derived={})
    before = {key: value for key, value in now.values.items() if key.rpartition(".")[2] not in new}
    assert len(now.values) == len(before) + len(new)
    saved = Checkpoint(tmp_path, 1, before, None)
    check_identity(saved, now)
    for change in (RANDAUGMENTED, "data.augment.erasing=0.5"):
        other = run_identity(configured(PretrainConfig, digits, change), derived={})
        with pytest.raises(InputError, match=f"{change.partition('=')[0]} was None, now"):
            check_identity(saved, other)
