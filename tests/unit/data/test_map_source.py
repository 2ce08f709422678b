"""Data sets of the user's own are checked as those of files are."""

from pathlib import Path

import numpy as np
import pytest

from mae_vit.core.errors import InputError
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.index import open_index
from mae_vit.data.map_source import MapSource, register_source
from mae_vit.data.shards.dataset_json import SOURCES

GRAY = np.zeros((1, 8, 8), np.uint8)


class Own(MapSource):
    height = width = (8, 8)
    fingerprint = "own"

    def __init__(self, labels, image=GRAY):
        self.labels, self.image = labels, image

    def read(self, sample):
        return self.image


@pytest.fixture
def register():
    """Registers a data set "own" of two classes for one test."""

    def run(source: MapSource) -> Path:
        register_source("own", {"train": lambda: source}, classes=["a", "b"], mean=[0.5], std=[0.2])
        return Path("own")

    yield run
    SOURCES.pop("own", None)


@pytest.mark.parametrize("labels", [[], [0, 2], [-2, 0], [0.0, 1.0]])
def test_labels_that_are_none_are_refused(register, labels, said):
    with pytest.raises(InputError) as caught:
        open_index(register(Own(np.array(labels))), "train")
    said(str(caught.value))


@pytest.mark.parametrize(
    "image",
    [GRAY[0], GRAY.transpose(1, 2, 0), GRAY.astype(np.float32), np.zeros((3, 8, 8), np.int64), "a.png"],
)
def test_images_of_other_shapes_and_types_are_refused(register, image, said):
    index = open_index(register(Own(np.zeros(2, int), image)), "train")
    with pytest.raises(InputError) as caught:
        index.read(1)
    said(str(caught.value))


def test_their_cache_has_no_effect(register):
    path = str(register(Own(np.zeros(2, int))))
    assert resolve_data_path(path).folder == Path(path)
    with pytest.raises(InputError, match=r"data\.cache_dir has no effect"):
        resolve_data_path(path, cache_dir="cache")
