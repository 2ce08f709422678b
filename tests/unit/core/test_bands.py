"""What raw values mean: unit scale and missing pixels."""

import json

import pytest
import torch

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.data.shards.dataset_json import parse_dataset


def test_unit_maps_low_and_high_of_each_band():
    bands = Bands(("a", "b"), "uint16", (0.0, 100.0), (1000.0, 300.0))
    images = torch.tensor([[[0, 500, 1000, 2000]], [[100, 200, 300, 500]]], dtype=torch.uint16)[None]
    want = torch.tensor([[[0.0, 0.5, 1.0, 2.0]], [[0.0, 0.5, 1.0, 2.0]]])[None]
    torch.testing.assert_close(bands.unit(images), want)
    assert bands.valid(images) is None


def test_eight_bit_is_the_path_of_photographs():
    photographs = Bands(("gray",), "uint8", (0.0,), (255.0,))
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert photographs.eight_bit
    assert torch.equal(photographs.unit(images), images.float() / 255)
    assert not Bands(("gray",), "uint8", (0.0,), (200.0,)).eight_bit
    assert not Bands(("gray",), "uint8", (0.0,), (255.0,), nodata=0).eight_bit


TABLE = {
    "names": ["red", "near infrared"],
    "dtype": "uint16",
    "scale": {"low": [0, 10], "high": [4000, 5000], "by": "percentiles 1, 99"},
    "nodata": 0,
    "nodata_share": [0.25, 0],
    "min": [1, 2],
    "max": [9000, 9001],
    "percentiles": {"1": [0, 10], "2": [1, 11], "50": [500, 600], "98": [3900, 4900], "99": [4000, 5000]},
    "exact": True,
}


@pytest.fixture
def described(digits) -> dict:
    """A dataset.json of two bands."""
    plain = json.loads((digits / "dataset.json").read_text())
    changes = {"channels": 2, "mean": [0.5, 0.25], "std": [0.1, 0.2], "bands": TABLE}
    splits = plain.pop("splits")
    return {**plain, **changes, "splits": splits}


def test_dataset_json_holds_bands(described):
    dataset = parse_dataset(json.dumps(described).encode(), "dataset.json")
    assert dataset.bands == Bands(("red", "near infrared"), "uint16", (0, 10), (4000, 5000), 0)
    assert list(json.loads(dataset.to_json())["bands"].items()) == list(TABLE.items())
    assert json.loads(dataset.to_json()) == described


def test_without_bands_nothing_is_added(digits):
    plain = (digits / "dataset.json").read_bytes()
    dataset = parse_dataset(plain, "dataset.json")
    assert dataset.bands is RGB8
    assert dataset.to_json().encode() == plain


@pytest.mark.parametrize(
    "change",
    [
        *({"names": ["red", "red"]}, {"min": [1]}, {"dtype": "float64"}),
        {"scale": {"low": [0, 0], "high": [1, 0], "by": "given"}},
        {"names": ["red"], **{key: [1] for key in ("nodata_share", "min", "max")}},
    ],
    ids=",".join,
)
def test_damaged_bands_are_one_line(described, change, said):
    with pytest.raises(InputError) as error:
        parse_dataset(json.dumps({**described, "bands": {**TABLE, **change}}).encode(), "dataset.json")
    said(error)
