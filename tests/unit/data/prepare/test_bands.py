"""`mae-vit prepare` of images of bands: choice, scale, missing values, windows, mixtures."""

import json
import math
import pickle

import numpy as np
import pytest
from helpers.images import encoded, picture, write_files, write_tar
from unit.data.band_files import chunky, dicom, npy, planes, png, tiff, values

from mae_vit.core.bands import Bands
from mae_vit.data.images.bands.read import open_bands, open_raster
from mae_vit.data.prepare.bands import BandStatistics

WIDE = values(13, "uint16")
PHOTO = encoded(picture(0, (8, 8)), "png")


def tiles(count=3):
    """Files of other values each."""
    return {f"{n}.tif": planes(WIDE + np.uint16(100 * n)) for n in range(count)}


def stored(result, key):
    (data,) = result.images()[key].values()
    return open_bands(data, result.dataset.bands).pixels


@pytest.mark.parametrize("second", [200, 3])
def test_zeros_far_below_all_other_values_may_be_missing_pixels(call, second):
    array = np.full((3, 10, 10), second, np.uint16)
    array[:, 0, :2], array[:, 9] = 0, 4000
    assert ("--nodata 0" in call({"1.tif": planes(array)}).text) == (second > 10)
    assert "--nodata 0" not in call({"1.tif": planes(array)}, options="--nodata 0", out="marked").text


def test_tiles_are_stored_as_arrays_and_described(call, said):
    result = call(tiles())
    said(result.text)
    files = {f"{n}.npy": npy(WIDE + np.uint16(100 * n)) for n in range(3)}
    assert {f"{key}.npy": sample["npy"] for key, sample in result.images().items()} == files
    dataset, table = result.dataset, result.dataset.band_table
    by_band = np.stack([WIDE + 100 * n for n in range(3)]).astype(np.float64).swapaxes(0, 1).reshape(13, -1)
    assert table.exact
    np.testing.assert_array_equal(table.min, by_band.min(axis=1))
    np.testing.assert_array_equal(table.max, by_band.max(axis=1))
    for share, percentile in table.percentiles.items():
        expected = np.percentile(by_band, int(share), axis=1, method="inverted_cdf")
        np.testing.assert_array_equal(percentile, expected)
    low, high = np.array(table.scale.low)[:, None], np.array(table.scale.high)[:, None]
    np.testing.assert_allclose(dataset.mean, ((by_band - low) / (high - low)).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(dataset.std, ((by_band - low) / (high - low)).std(axis=1), rtol=1e-6)
    data = json.loads((result.out / "dataset.json").read_text())
    assert "nodata" not in data["bands"]
    assert list(data["bands"]["percentiles"]) == ["1", "2", "50", "98", "99"]


@pytest.mark.parametrize(
    ("choice", "indices"), [("4,3,2", (3, 2, 1)), ("12-13,1", (11, 12, 0)), ("band 2", (1,))]
)
def test_bands_are_chosen_and_ordered(call, choice, indices):
    result = call(tiles(), options=["--bands", choice])
    assert result.dataset.bands.names == tuple(f"band {index + 1}" for index in indices)
    np.testing.assert_array_equal(stored(result, "2"), (WIDE + 200)[list(indices)])


REFUSED = [
    "--bands 14", "--bands nir", "--bands 1,1", "--scale 5,1", "--nodata x", "--nodata 0.5", "--window 40,0",
    "--window 40,4 --scale none", "--take 13xfloat64", "--take 8-bit", "--take 5xuint16", "--exclude .",
    "--take 8-bit --nodata 0",
]  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_make_no_sense(call, said, options):
    result = call(tiles(1), options=options)
    said(result.text)
    assert (result.code, result.out.exists()) == (2, False)


def test_eight_bits_with_and_without_a_fourth_band(call):
    byte = values(4, "uint8", 0, 255)
    result = call({"a.tif": chunky(byte, photometric="rgb", extrasamples=["unspecified"])})
    names = tuple(f"band {n}" for n in range(1, 5))
    assert result.dataset.bands == Bands(names, "uint8", (0,) * 4, (255,) * 4)
    np.testing.assert_array_equal(stored(result, "a"), byte)
    plain = call({"a.tif": chunky(byte[:3], photometric="rgb")}, out="photos")
    assert plain.dataset.bands.photographs


@pytest.mark.parametrize(
    ("option", "low", "high", "by"),
    [("0,10000", 0, 10000, "given"), ("-5,1e3", -5, 1000, "given"), ("none", 0, 65535, "none")],
)
def test_scale(call, option, low, high, by):
    dataset = call(tiles(), options=f"--scale={option}").dataset
    table = dataset.band_table
    assert (table.scale.by, set(table.scale.low), set(table.scale.high)) == (by, {low}, {high})
    raw = np.array(dataset.mean) * (high - low) + low
    np.testing.assert_allclose(raw, (WIDE + 100.0).mean(axis=(1, 2)), rtol=1e-5)


@pytest.mark.parametrize("copies", [2, 3])
def test_statistics_are_those_of_the_images_that_copies_of_held_out_ones_leave(call, copies):
    files = {
        f"{n}{i}.npy": npy(WIDE + np.uint16(100 * n)) for n in range(24 // copies) for i in range(copies)
    }
    result = call(files, options="--holdout 1/4 --scale none")
    assert result.code == 0
    written = np.stack([stored(result, key) for key in result.images()])
    assert len(written) < 18
    np.testing.assert_allclose(result.dataset.mean, written.mean(axis=(0, 2, 3)) / 65535, rtol=1e-5)


def test_missing_values_are_no_values(call, said):
    holes = WIDE[:2].copy()
    holes[0, :10], holes[1] = 0, 7
    result = call({"a.npy": npy(holes)}, options="--nodata 0")
    said(result.text)
    dataset, table = result.dataset, result.dataset.band_table
    assert (table.nodata, table.nodata_share) == (0, [0.25, 0])
    assert table.min[0] == holes[0, 10:].min()
    assert (table.scale.low[1], table.scale.high[1], dataset.std[1]) == (7, 8, 0)
    low, high = table.scale.low[0], table.scale.high[0]
    np.testing.assert_allclose(dataset.mean[0], ((holes[0, 10:] - low) / (high - low)).mean(), rtol=1e-6)
    holes[1] = 0
    refused = call({"a.npy": npy(holes)}, options="--nodata 0", out="b")
    said(refused.text)
    assert (refused.code, list(refused.out.glob("*"))) == (2, [])


def test_a_window_clips_and_is_the_scale(call):
    scan = values(1, "uint16", 0, 3000)
    result = call({"a.dcm": dicom(scan, RescaleSlope=1, RescaleIntercept=-1024)}, options="--window 40,400")
    assert result.dataset.bands == Bands(("band 1",), "int16", (-160,), (240,))
    np.testing.assert_array_equal(stored(result, "a"), np.clip(scan.astype(np.int64) - 1024, -160, 240))


@pytest.mark.parametrize(
    ("nodata", "dtype"), [(0, "int16"), (100, "int16"), (0, "float32"), (100, "float32")]
)
def test_clipped_values_are_not_missing(call, nodata, dtype):
    """Even if the missing value is an end of the window."""
    array = np.arange(-300, 300, dtype=dtype).reshape(1, 20, 30)
    result = call({"1.npy": npy(array)}, options=f"--window 50,100 --nodata {nodata}")
    assert result.dataset.band_table.nodata_share == [0.001667]
    np.testing.assert_allclose(stored(result, "1"), array.clip(0, 100), atol=1)


def test_dicom_with_a_viewer_and_in_a_table_are_the_images(tmp_path, call, said):
    scans = {f"CT/IMG{n}": dicom(values(1, "uint16", 0, 3000)) for n in range(3)}
    result = call(scans | {"VIEWER/LOGO.PNG": PHOTO, "DICOMDIR": scans["CT/IMG0"]})
    said(result.text)
    assert result.dataset.splits["train"].samples == 3
    rows = {"t.csv": b"id,label\nIMG0,x\nIMG1,y\nIMG2,y"}
    table = write_files(tmp_path / "b", {f"{name}.dcm": scan for name, scan in scans.items()} | rows)
    assert call(table / "t.csv", out="b_out").counts() == "train: x 1, y 2"


@pytest.mark.parametrize(
    ("first", "other", "data"),
    [
        ("a.tif", "z.tif", tiff(WIDE[:5])),
        ("a.npy", "z.npy", npy(WIDE.astype(np.float32))),
        ("a.tif", "z.png", png(WIDE[:1])),
    ],
    ids=["bands", "type", "format"],
)
def test_a_mixture_is_refused_unless_it_is_said_which_to_take(call, first, other, data):
    files = {first: npy(WIDE) if first == "a.npy" else planes(WIDE), other: data}
    odd = open_raster(data).kind
    refused = call(files)
    assert (refused.code, list(refused.out.glob("*"))) == (2, [])
    assert f"--take {odd}" in refused.text
    result = call(files, options="--take 13xuint16")
    assert f"{other}: {odd}" in result.text
    assert set(result.images()) == {"a"}


def test_pages_are_bands_and_the_first_of_each_may_be_taken(call, said):
    scan = values(3, "uint8", 0, 255)
    files = {f"{count}.tif": tiff(scan[:count]) for count in (2, 3)}
    refused = call(files)
    said(refused.text)
    assert refused.code == 2
    files["1.tif"] = tiff(scan[0])
    assert set(call(files, options="--bands 1").images()) == {"1", "2", "3"}
    # Three pages are no RGB.
    for kind, keys in (("3xuint8", {"3"}), ("8-bit", {"1"})):
        result = call(files, options=f"--take {kind}", out=kind)
        said(result.text)
        assert set(result.images()) == keys


def test_files_that_name_their_bands_differently(call):
    def named(*names):
        item = '<Item name="DESCRIPTION" sample="{}" role="description">{}</Item>'
        items = "".join(item.format(n, name) for n, name in enumerate(names))
        return [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]

    red_first = planes(WIDE[:2], extratags=named("red", "nir"))
    files = {"a.tif": red_first, "b.tif": planes(WIDE[1::-1], extratags=named("nir", "red"))}
    assert call(files).code == 2
    result = call(files, options="--bands nir,red")
    assert result.dataset.bands.names == ("nir", "red")
    for key in ("a", "b"):
        np.testing.assert_array_equal(stored(result, key), WIDE[1::-1])


def test_a_later_split_must_have_the_bands_of_the_data_set(tmp_path, call, said):
    source = write_files(tmp_path / "tiles", tiles())
    assert call(source).code == 0
    others = [
        (write_files(tmp_path / "odd", {"a.tif": tiff(WIDE[:5])}), "--split val"),
        (write_files(tmp_path / "photos", {"a.png": PHOTO}), "--split val"),
        (source, "--split val --scale 0,1"),
    ]
    for folder, options in others:
        result = call(folder, options=options)
        said(result.text)
        assert result.code == 2
    assert set(call(source, options="--split val").dataset.splits) == {"train", "val"}


NAMED = "".join(
    f'<Item name="DESCRIPTION" sample="{n}" role="description">{b}</Item>' for n, b in enumerate("xyz")
)


def test_shards_of_bands_keep_what_their_description_says(call, said):
    """Names, missing value, scale and the record of what was done, which NPY does not state."""
    pixels = np.where(values(3, "uint16") % 3 == 0, 0, values(3, "uint16") + 500).astype(np.uint16)
    tags = [(42112, "s", 0, f"<GDALMetadata>{NAMED}</GDALMetadata>", True)]
    files = {f"{n}.tif": planes(pixels + np.uint16(n) * (pixels > 0), extratags=tags) for n in range(8)}
    for options in ("", "--bands z,1", "--window 3000,4000", "--scale none"):
        first = call(files, options=f"{options} --nodata 0 --overwrite")
        again = call(first.out, options="--overwrite", out="again")
        one, two = first.dataset, again.dataset
        assert one.model_copy(update={"splits": {}}) == two.model_copy(update={"splits": {}})
        assert one.splits["train"].processing == two.splits["train"].processing
        held_out = call(first.out, options="--holdout 1/4 --overwrite", out="held_out").dataset.splits["val"]
        assert held_out.processing.of_images == one.splits["train"].processing.of_images
    assert call(first.out, options="--bands z,1", out="z").dataset.bands.names == ("z", "x")
    refused = call(call(first.out, options="--bands z,1", out="z").out, options="--bands z", out="zz")
    said(refused.text)
    assert (refused.code, refused.out.exists()) == (2, False)


@pytest.mark.parametrize("shape", [(29, 12, 12), (29, 12, 8), (20, 16, 12), (12, 12, 29)])
def test_more_bands_than_pixels_are_stored_and_read(call, shape):
    array = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    last = shape[0] == shape[1]  # as only raw arrays have them
    result = call({"a.npy": npy(array)} if last else {"a.tif": planes(array)})
    np.testing.assert_array_equal(stored(result, "a"), array.transpose(2, 0, 1) if last else array)
    again = call(result.out, out="again")
    np.testing.assert_array_equal(stored(again, "a"), stored(result, "a"))
    assert (
        call(result.out, options="--in-place --overwrite --nodata 1").dataset.bands.names
        == again.dataset.bands.names
    )


def test_arrays_that_may_be_stacks_are_refused_unless_their_bands_are_last(call):
    refused = call({"a.npy": npy(np.zeros((29, 12, 12), np.uint16))})
    assert refused.code == 2
    assert "a stack of 29 images of 12x12 px" in refused.text
    assert "if it is a single image, write it as (12, 12, 29))" in refused.text
    assert "single image" not in call({"a.npy": npy(np.zeros((513, 12, 12), np.uint16))}).text


def test_arrays_beside_photographs_are_none(tmp_path, call):
    files = {"a.png": PHOTO, "a.npy": npy(np.zeros(512, np.float32))}
    for source in (files, write_tar(tmp_path / "train-0.tar", files)):
        assert call(source, options="--overwrite").dataset.splits["train"].formats == {"png": 1}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float16", "float32"])
def test_statistics_in_parts_are_those_of_all(dtype):
    rng = np.random.default_rng(0)
    images = (rng.normal(60, 20, (9, 3, 16, 16)).clip(0, 200)).astype(dtype)
    nodata = float(images[0, 0, 0, 0])
    whole, merged = BandStatistics(3, dtype, nodata), BandStatistics(3, dtype, nodata)
    for image in images:
        whole.add(image)
    for chunk in (images[:4], images[4:]):
        part = BandStatistics(3, dtype, nodata)
        for image in chunk:
            part.add(image)
        # As a process hands it over.
        merged.merge(pickle.loads(pickle.dumps(part)))
    for mine, theirs, band in zip(whole.summary(), merged.summary(), images.swapaxes(0, 1), strict=True):
        valid = band[band != nodata].astype(np.float64)
        for summary in (mine, theirs):
            assert (summary.pixels, summary.missing) == (len(valid), band.size - len(valid))
            np.testing.assert_allclose((summary.mean, summary.std), (valid.mean(), valid.std()), rtol=1e-9)
            assert (summary.low, summary.high) == (valid.min(), valid.max())
            expected = np.percentile(valid, (1, 2, 50, 98, 99), method="inverted_cdf")
            np.testing.assert_array_equal(summary.percentiles, expected)


def test_the_sample_of_float32_stays_bounded(monkeypatch):
    monkeypatch.setattr("mae_vit.data.prepare.bands._SAMPLE", 1 << 14)
    statistics = BandStatistics(1, "float32", None)
    images = np.random.default_rng(0).normal(0, 1, (200, 1, 40, 40)).astype(np.float32)
    for image in images:
        statistics.add(image)
    assert statistics.sampled <= 1 << 14
    summary = statistics.summary()[0]
    np.testing.assert_allclose(summary.percentiles, np.percentile(images, (1, 2, 50, 98, 99)), atol=0.15)
    np.testing.assert_allclose((summary.mean, summary.std), (images.mean(), images.std()), atol=1e-5)
