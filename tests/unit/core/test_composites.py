"""Images of bands in colors: which bands, and what labels say."""

import numpy as np
import pytest
import torch

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import Picture, compose, draw_rows, find_bands, in_colors

NAMES = ("B01", "B02", "B03", "B04", "B08")
BANDS = Bands(NAMES, "uint16", (0.0, 10.0, 20.0, 30.0, 40.0), (100.0, 110.0, 120.0, 130.0, 140.0))
IMAGES = torch.rand(3, 5, 4, 6, generator=torch.Generator().manual_seed(0))


def test_three_bands_by_name_or_number_are_red_green_and_blue():
    for wanted in (["B08", "B04", "B01"], [5, 4, 1]):
        colors = compose(IMAGES, BANDS, wanted)
        assert torch.equal(colors(IMAGES), IMAGES[:, [4, 3, 0]])
        assert colors.label.startswith("B08 40..140, B04 30..130, B01 0..100 ")
    gray = compose(IMAGES, BANDS, ["B03"])
    assert torch.equal(gray(IMAGES), IMAGES[:, 2:3])
    assert gray.label == "B03 20..120"


def test_names_of_colors_are_known():
    assert torch.equal(compose(IMAGES, BANDS)(IMAGES), IMAGES[:, [3, 2, 1]])
    two = Bands(("vv", "vh"), "float32", (-25.0, -32.0), (0.0, -5.0))
    assert compose(IMAGES[:, :2], two).label == "vv -25..0"


def test_other_bands_are_shown_by_the_principal_components_of_numpy():
    bands = Bands(tuple("abcde"), "uint16", BANDS.low, BANDS.high)
    colors = compose(IMAGES, bands)
    pixels = IMAGES.movedim(1, -1).reshape(-1, 5).double().numpy()
    centered = pixels - pixels.mean(axis=0)
    _, singular, vectors = np.linalg.svd(centered, full_matrices=False)
    drawn = colors(IMAGES).movedim(1, -1).reshape(-1, 3).numpy()
    for component in range(3):
        vector = vectors[component] * np.sign(vectors[component][np.abs(vectors[component]).argmax()])
        spread = singular[component] / np.sqrt(len(pixels))
        expected = (centered @ vector / (5 * spread) + 0.5).clip(0, 1)
        np.testing.assert_allclose(drawn[:, component], expected, atol=1e-5)
    share = (singular[:3] ** 2).sum() / (singular**2).sum()
    assert f"({share:.0%} " in colors.label


def test_rows_get_the_colors_of_the_original_and_photographs_stay():
    rows = [Picture("masked", IMAGES * 0.5), Picture("original", IMAGES)]
    drawn = in_colors(rows, BANDS)
    assert drawn[0].label == "masked"
    assert drawn[1].label.startswith("original: B04 30..130, B03 20..120, B02 10..110 ")
    assert torch.equal(drawn[0].images, IMAGES[:, [3, 2, 1]] * 0.5)
    tint = torch.tensor([1.0, 0.5, 0.0, 0.25]).view(1, 4, 1, 1).expand(len(IMAGES), 4, *IMAGES.shape[2:])
    tinted, original = in_colors(
        [Picture("class", IMAGES[:, :1], tint), Picture("original", IMAGES[:, :3])], RGB8
    )
    assert torch.equal(original.images, IMAGES[:, :3])
    torch.testing.assert_close(
        tinted.images[:, :2], 0.75 * IMAGES[:, :1] + torch.tensor([0.25, 0.125]).view(2, 1, 1)
    )


@pytest.mark.parametrize("wanted", [["B4", "B03", "B02"], [0], [6], [1, 2]], ids=str)
def test_a_band_that_is_not_there_is_named(wanted, said):
    with pytest.raises(InputError) as error:
        find_bands(wanted, BANDS, 5)
    said(error)


def test_a_label_that_is_too_long_for_its_row_goes_on_below():
    images = torch.zeros(2, 3, 8, 8)
    short, long = (draw_rows([Picture("word " * words, images)]) for words in (1, 12))
    assert long.shape == (short.shape[0] + 2 * 14, *short.shape[1:])
    assert (long[28:42].min(axis=(0, 1)) < 128).all(), "text in the third line"


def test_labels_are_drawn_with_the_letters_of_other_languages():
    drawn = [draw_rows([Picture(letter, IMAGES[:, :1])])[:14].tobytes() for letter in "äŁЖΩ"]
    assert len(set(drawn)) == 4  # a missing letter is the same box
