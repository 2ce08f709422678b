"""The digits of the package."""

import io

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from mae_vit.data.prepare.sources.downloads import digits


def test_the_digits_are_scikit_learns():
    theirs = load_digits()
    ours = sorted(digits().entries, key=lambda entry: entry.key.partition("/")[2])
    pixels = [np.asarray(Image.open(io.BytesIO(entry.read()))) for entry in ours]
    assert np.array_equal(np.rint(theirs.images * (255 / 16)), pixels)
    assert [entry.class_name for entry in ours] == [str(label) for label in theirs.target]
