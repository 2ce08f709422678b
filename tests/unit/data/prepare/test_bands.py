"""`mae-vit prepare` of images of bands: choice, scale, missing values, windows, mixtures."""

import io
import json
import tarfile

import numpy as np
import pytest
from helpers.images import write_tar
from PIL import Image
from unit.data.band_files import SIZE, chunky, dicom, npy, planes, png, tiff, values

from mae_vit.cli.main import main
from mae_vit.core.bands import Bands
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.bands.read import decode_bands, open_raster
from mae_vit.data.index import open_index
from mae_vit.data.prepare.bands.statistics import BandStatistics
from mae_vit.data.shards.dataset_json import read_dataset

WIDE = values(13, "uint16")


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


@pytest.fixture
def tiles(tmp_path):
    """Six tiles, each of other values."""
    return write(tmp_path / "src", {f"{n}.tif": planes(WIDE + np.uint16(100 * n)) for n in range(6)})


def prepared(*arguments):
    arguments = [str(argument) for argument in arguments]
    code = main(["prepare", *arguments])
    return code


def members(folder):
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


@pytest.mark.parametrize(("second", "said"), [(200, True), (3, False)])
def test_zeros_far_below_all_other_values_may_be_missing_pixels(tmp_path, capsys, second, said):
    values = np.full((3, 10, 10), second, np.uint16)
    values[:, 0, :2], values[:, 9] = 0, 4000
    source = write(tmp_path / "src", {f"{n}.tif": planes(values) for n in range(3)})
    assert prepared(source, tmp_path / "out") == 0
    line = "warning: 2 % of each band's pixels or more are 0, and none are 1 to 9: if 0 means no data, give --nodata 0"
    assert (line in capsys.readouterr().out) == said
    assert prepared(source, tmp_path / "marked", "--nodata", 0) == 0
    assert "if 0 means" not in capsys.readouterr().out


def test_tiles_are_stored_as_arrays_and_described(tiles, tmp_path, capsys):
    assert prepared(tiles, tmp_path / "out") == 0
    output = capsys.readouterr().out
    assert "13 bands of uint16, scaled by percentiles 1, 99" in output
    assert "warning: values from 1 to 4500 are 6.9 % of the range of uint16" in output
    assert "6 written as .npy" in output
    stored = members(tmp_path / "out")
    assert stored == {f"{n}.npy": npy(WIDE + np.uint16(100 * n)) for n in range(6)}
    dataset = read_dataset(tmp_path / "out")
    table, pixels = dataset.band_table, np.stack([WIDE + 100 * n for n in range(6)]).astype(np.float64)
    by_band = pixels.transpose(1, 0, 2, 3).reshape(13, -1)
    assert table.exact
    np.testing.assert_array_equal(table.min, by_band.min(axis=1))
    np.testing.assert_array_equal(table.max, by_band.max(axis=1))
    for share, found in table.percentiles.items():
        np.testing.assert_array_equal(
            found, np.percentile(by_band, int(share), axis=1, method="inverted_cdf")
        )
    low, high = np.array(table.scale.low)[:, None], np.array(table.scale.high)[:, None]
    np.testing.assert_allclose(dataset.mean, ((by_band - low) / (high - low)).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(dataset.std, ((by_band - low) / (high - low)).std(axis=1), rtol=1e-6)
    assert dataset.channels == 13
    assert main(["check", str(tmp_path / "out"), "--decode"]) == 0


def test_processes_find_the_same(tmp_path):
    files = {f"{n}.npy": npy(values(2, "float32", n, n + 5) + np.float32(n / 7)) for n in range(530)}
    source = write(tmp_path / "src", files)
    assert prepared(source, tmp_path / "one", "--workers", "0") == 0
    assert prepared(source, tmp_path / "two", "--workers", "2") == 0
    one, two = (read_dataset(tmp_path / name) for name in ("one", "two"))
    # Images are grouped differently, which moves the last digits of floats.
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-7)
    np.testing.assert_allclose(one.std, two.std, rtol=1e-7)
    assert one.band_table.percentiles == two.band_table.percentiles
    assert not one.band_table.exact


@pytest.mark.parametrize(
    ("choice", "places"), [("4,3,2", (3, 2, 1)), ("12-13,1", (11, 12, 0)), ("band 2", (1,))]
)
def test_bands_are_chosen_and_ordered(tiles, tmp_path, choice, places):
    assert prepared(tiles, tmp_path / "out", "--bands", choice) == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.bands.names == tuple(f"band {place + 1}" for place in places)
    stored = members(tmp_path / "out")
    assert {name.rpartition(".")[2] for name in stored} == {"npy"}
    np.testing.assert_array_equal(
        np.load(io.BytesIO(stored["2.npy"]), allow_pickle=False), (WIDE + 200)[list(places)]
    )
    np.testing.assert_array_equal(decode_bands(stored["2.npy"], dataset.bands), (WIDE + 200)[list(places)])


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("14", "it has bands 1 to 13, not 14"),
        ("0", "it has bands 1 to 13, not 0"),
        ("nir", 'it has no band "nir", and its 13 bands have no names'),
        ("1,1", "takes a band twice"),
        ("1,,2", "give numbers from 1, ranges or names"),
    ],
)
def test_bands_that_are_not_there(tiles, tmp_path, capsys, choice, why):
    assert prepared(tiles, tmp_path / "out", "--bands", choice) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mae-vit: error")]
    assert len(lines) == 1
    assert why in lines[0]
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_transparency_is_a_band_if_it_is_asked_for(tmp_path, capsys):
    data = chunky(WIDE[:4], photometric="rgb", extrasamples=["unassalpha"])
    source = write(tmp_path / "src", {"a.tif": data})
    assert prepared(source, tmp_path / "rgb") == 0
    assert "marked as transparency, left out (--bands 1-4 takes it)" in capsys.readouterr().out
    assert prepared(source, tmp_path / "all", "--bands", "1-4") == 0
    counts = [read_dataset(tmp_path / name).channels for name in ("rgb", "all")]
    assert counts == [3, 4]
    stored = members(tmp_path / "all")["a.npy"]
    assert len(decode_bands(stored, read_dataset(tmp_path / "all").bands)) == 4


def test_eight_bits_with_and_without_a_fourth_band(tmp_path, capsys):
    byte = values(4, "uint8", 0, 255)
    infrared = chunky(byte, photometric="rgb", extrasamples=["unspecified"])
    assert prepared(write(tmp_path / "src", {"a.tif": infrared}), tmp_path / "out") == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.bands == Bands(tuple(f"band {n}" for n in range(1, 5)), "uint8", (0,) * 4, (255,) * 4)
    np.testing.assert_array_equal(decode_bands(infrared, dataset.bands), byte)
    plain = write(tmp_path / "plain", {"a.tif": chunky(byte[:3], photometric="rgb")})
    assert prepared(plain, tmp_path / "photos") == 0
    assert '"bands"' not in (tmp_path / "photos" / "dataset.json").read_text()


@pytest.mark.parametrize(
    ("option", "low", "high", "by"),
    [
        ("0,10000", 0, 10000, "given"),
        ("-5,1e3", -5, 1000, "given"),
        ("none", 0, 65535, "none"),
        ("percentiles", None, None, "percentiles 1, 99"),
    ],
)
def test_scale(tiles, tmp_path, option, low, high, by):
    assert prepared(tiles, tmp_path / "out", f"--scale={option}") == 0
    dataset = read_dataset(tmp_path / "out")
    table = dataset.band_table
    assert table.scale.by == by
    if low is not None:
        assert (set(table.scale.low), set(table.scale.high)) == ({low}, {high})
    else:
        assert (table.scale.low, table.scale.high) == (table.percentiles["1"], table.percentiles["99"])
    raw = np.array(dataset.mean) * (np.array(table.scale.high) - table.scale.low) + table.scale.low
    np.testing.assert_allclose(raw, (WIDE + 250.0).mean(axis=(1, 2)), rtol=1e-5)


def test_missing_values_are_no_values(tmp_path, capsys):
    holes = WIDE[:2].copy()
    holes[0, :10], holes[1] = 0, 7
    source = write(tmp_path / "src", {"a.npy": npy(holes)})
    assert prepared(source, tmp_path / "out", "--nodata", "0") == 0
    output = capsys.readouterr().out
    assert 'warning: constant in all images: "band 2"' in output
    assert "no-data (0): 0 to 25 % of the pixels" in output
    dataset = read_dataset(tmp_path / "out")
    table = dataset.band_table
    assert (table.nodata, table.nodata_share) == (0, [0.25, 0])
    assert table.min[0] == holes[0, 10:].min()
    assert (table.scale.low[1], table.scale.high[1]) == (7, 8)
    assert dataset.std[1] == 0
    low, high = table.scale.low[0], table.scale.high[0]
    np.testing.assert_allclose(dataset.mean[0], ((holes[0, 10:] - low) / (high - low)).mean(), rtol=1e-6)


def test_a_band_of_missing_values_alone(tmp_path, capsys):
    holes = WIDE[:2].copy()
    holes[1] = 0
    source = write(tmp_path / "src", {"a.npy": npy(holes)})
    assert prepared(source, tmp_path / "out", "--nodata", "0") == 2
    assert 'band "band 2" has no value in any image (no-data: 0): leave it out' in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))
    assert prepared(source, tmp_path / "out", "--nodata", "0.5") == 2
    assert "--nodata 0.5 is no value of uint16" in capsys.readouterr().err


def test_a_window_clips_and_is_the_scale(tmp_path):
    scan = values(1, "uint16", 0, 3000)
    source = write(tmp_path / "src", {"a.dcm": dicom(scan, RescaleSlope=1, RescaleIntercept=-1024)})
    assert prepared(source, tmp_path / "out", "--window", "40,400") == 0
    dataset = read_dataset(tmp_path / "out")
    assert dataset.bands == Bands(("band 1",), "int16", (-160,), (240,))
    stored = decode_bands(members(tmp_path / "out")["a.npy"], dataset.bands)
    np.testing.assert_array_equal(stored, np.clip(scan.astype(np.int64) - 1024, -160, 240))


def test_dicom_with_a_viewer_and_in_a_table_are_the_images(tmp_path, capsys):
    scans = {f"CT/IMG{n}": dicom(values(1, "uint16", 0, 3000)) for n in range(3)}
    logo = png(values(3, "uint8"))
    source = write(tmp_path / "cd", scans | {"VIEWER/LOGO.PNG": logo, "DICOMDIR": scans["CT/IMG0"]})
    assert prepared(source, tmp_path / "out") == 0
    assert "left out 1 file beside 3 images of DICOM: VIEWER/LOGO.PNG" in capsys.readouterr().out
    rows = b"id,label\nIMG0,x\nIMG1,y\nIMG2,y"
    table = write(tmp_path / "b", {f"{name}.dcm": scan for name, scan in scans.items()} | {"t.csv": rows})
    assert prepared(f"{table}/t.csv", tmp_path / "out", "--overwrite") == 0
    assert read_dataset(tmp_path / "out").splits["train"].class_counts == [1, 2]


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("z.tif", tiff(WIDE[:5])),
        ("z.npy", npy(WIDE.astype(np.float32))),
        ("z.png", png(WIDE[:1])),
    ],
    ids=["bands", "type", "format"],
)
def test_a_mixture_is_refused_unless_it_is_said_which_to_take(tmp_path, capsys, other, kind):
    files = {"a.tif" if not other.endswith("npy") else "a.npy": planes(WIDE)}
    if other.endswith("npy"):
        files = {"a.npy": npy(WIDE)}
    source = write(tmp_path / "src", {**files, other: kind})
    odd = open_raster(kind).kind
    assert prepared(source, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "files differ in bands or type" in error
    assert f"--take {odd}" in error
    assert not list(tmp_path.glob("out/*"))
    assert prepared(source, tmp_path / "out", "--take", "13xuint16") == 0
    assert f"{other}: {odd}, where 13xuint16 is taken" in capsys.readouterr().out
    assert read_dataset(tmp_path / "out").splits["train"].samples == 1


def test_pages_are_bands_and_the_first_of_each_may_be_taken(tmp_path, capsys):
    scan = values(3, "uint8", 0, 255)
    source = write(tmp_path / "src", {f"{count}.tif": tiff(scan[:count]) for count in (2, 3)})
    assert prepared(source, tmp_path / "out") == 2
    assert "--bands 1 takes the first band or page of each TIFF" in capsys.readouterr().err
    write(tmp_path / "src", {"1.tif": tiff(scan[0])})
    assert prepared(source, tmp_path / "out", "--bands", 1) == 0
    assert len(members(tmp_path / "out")) == 3
    assert prepared(source, tmp_path / "pages", "--take", "3xuint8") == 0
    said = capsys.readouterr().out
    assert "1 of several pages, which are bands (--bands 1 takes the first page alone)" in said
    assert "left out 2 unreadable images" in said


def test_files_that_name_their_bands_differently(tmp_path, capsys):
    def named(*names):
        items = "".join(
            f'<Item name="DESCRIPTION" sample="{n}" role="description">{name}</Item>'
            for n, name in enumerate(names)
        )
        return [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]

    red_first = planes(WIDE[:2], extratags=named("red", "nir"))
    nir_first = planes(WIDE[1::-1], extratags=named("nir", "red"))
    source = write(tmp_path / "src", {"a.tif": red_first, "b.tif": nir_first})
    assert prepared(source, tmp_path / "out") == 2
    assert "order them by --bands" in capsys.readouterr().err
    assert prepared(source, tmp_path / "out", "--bands", "nir,red") == 0
    stored = members(tmp_path / "out")
    assert read_dataset(tmp_path / "out").bands.names == ("nir", "red")
    for name in ("a.npy", "b.npy"):
        np.testing.assert_array_equal(open_raster(stored[name]).pixels, WIDE[1::-1])


def test_a_later_split_must_have_the_bands_of_the_data_set(tiles, tmp_path, capsys):
    assert prepared(tiles, tmp_path / "out") == 0
    odd = write(tmp_path / "odd", {"a.tif": tiff(WIDE[:5])})
    assert prepared(odd, tmp_path / "out", "--split", "val") == 2
    assert "is 5xuint16, others are 13xuint16" in capsys.readouterr().err
    photo = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    stream = io.BytesIO()
    photo.save(stream, "png")
    photos = write(tmp_path / "photos", {"a.png": stream.getvalue()})
    assert prepared(photos, tmp_path / "out", "--split", "val") == 2
    assert "is 8-bit, others are 13xuint16" in capsys.readouterr().err
    assert prepared(tiles, tmp_path / "out", "--split", "val", "--scale", "0,1") == 2
    assert "the scale of" in capsys.readouterr().err
    assert prepared(tiles, tmp_path / "out", "--split", "val") == 0
    assert sorted(read_dataset(tmp_path / "out").splits) == ["train", "val"]


def test_shards_of_others_are_described_in_place(tiles, tmp_path):
    files = {f"{n}.tif": planes(WIDE + np.uint16(100 * n), compression="lzw") for n in range(3)}
    write_tar(tmp_path / "one" / "train-0.tar", files)
    assert prepared("--in-place", tmp_path / "one", "--scale", "0,9") == 0
    assert members(tmp_path / "one") == files
    dataset = read_dataset(tmp_path / "one")
    assert (set(dataset.bands.low), set(dataset.bands.high)) == ({0}, {9})
    source = open_source(
        open_index(tmp_path / "one", "train"), "tar", channels=13, augment=Augment(SIZE), memory_limit_gib=1
    )
    read = source.render(0, 0, np.arange(3)).images
    np.testing.assert_array_equal(read, np.stack([WIDE + np.uint16(100 * n) for n in range(3)]))
    assert prepared("--in-place", tmp_path / "one", "--bands", "1", "--overwrite") == 2


def test_resized_bands_stay_bands(tiles, tmp_path):
    assert prepared(tiles, tmp_path / "out", "--resize", "20") == 0
    dataset = read_dataset(tmp_path / "out")
    assert (dataset.splits["train"].height, dataset.splits["train"].width) == ((20, 20), (28, 28))
    small = decode_bands(members(tmp_path / "out")["0.npy"], dataset.bands)
    np.testing.assert_allclose(small.mean(axis=(1, 2)), WIDE.mean(axis=(1, 2)), rtol=0.02)


def test_arrays_beside_photographs_are_none(tmp_path, capsys):
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "png")
    files = {"a.png": stream.getvalue(), "a.npy": npy(np.zeros(512, np.float32))}
    assert prepared(write(tmp_path / "src", files), tmp_path / "out") == 0
    assert "left out 1 .npy, .npz or .dcm files beside images" in capsys.readouterr().out
    shard = tmp_path / "train-000000.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("a.npy", "a.png"):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    assert prepared(shard, tmp_path / "from_shard") == 0
    assert read_dataset(tmp_path / "from_shard").splits["train"].formats == {"png": 1}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--scale", "5,1"], "LOW must be below HIGH"),
        (["--scale", "auto"], "give percentiles, none or LOW,HIGH"),
        (["--nodata", "x"], "give a number"),
        (["--window", "40"], "give CENTER,WIDTH"),
        (["--window", "40,0"], "its width must be above 0"),
        (["--window", "40,4", "--scale", "none"], "--window sets the scale"),
        (["--take", "13xfloat64"], "give bands and type such as 13xuint16"),
        (["--exclude", "."], ""),
    ],
)
def test_options_that_make_no_sense(tiles, tmp_path, capsys, options, why):
    assert prepared(tiles, tmp_path / "out", *options) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float16", "float32"])
def test_statistics_in_parts_are_those_of_all(dtype):
    rng = np.random.default_rng(0)
    images = (rng.normal(60, 20, (9, 3, 16, 16)).clip(0, 200)).astype(dtype)
    nodata = float(images[0, 0, 0, 0])
    one, two = BandStatistics(3, dtype, nodata), BandStatistics(3, dtype, nodata)
    for image in images:
        one.add(image)
    for chunk in (images[:4], images[4:]):
        part = BandStatistics(3, dtype, nodata)
        for image in chunk:
            part.add(image)
        two.merge(handed_over(part))
    for mine, theirs, band in zip(one.summary(), two.summary(), images.transpose(1, 0, 2, 3), strict=True):
        valid = band[band != nodata].astype(np.float64)
        assert (
            (mine.pixels, mine.missing)
            == (theirs.pixels, theirs.missing)
            == (len(valid), band.size - len(valid))
        )
        for found in (mine, theirs):
            np.testing.assert_allclose((found.mean, found.std), (valid.mean(), valid.std()), rtol=1e-9)
            assert (found.low, found.high) == (valid.min(), valid.max())
            expected = np.percentile(valid, (1, 2, 50, 98, 99), method="inverted_cdf")
            np.testing.assert_array_equal(found.percentiles, expected)


def handed_over(statistics):
    """As a process hands it over."""
    import pickle

    return pickle.loads(pickle.dumps(statistics))


def test_the_sample_of_float32_stays_bounded(monkeypatch):
    monkeypatch.setattr("mae_vit.data.prepare.bands.statistics._SAMPLE", 1 << 14)
    statistics = BandStatistics(1, "float32", None)
    rng = np.random.default_rng(0)
    images = rng.normal(0, 1, (200, 1, 40, 40)).astype(np.float32)
    for image in images:
        statistics.add(image)
    assert statistics.sampled <= 1 << 14
    found = statistics.summary()[0]
    np.testing.assert_allclose(found.percentiles, np.percentile(images, (1, 2, 50, 98, 99)), atol=0.15)
    np.testing.assert_allclose((found.mean, found.std), (images.mean(), images.std()), atol=1e-5)


def test_dataset_json_is_what_readers_expect(tiles, tmp_path):
    assert prepared(tiles, tmp_path / "out", "--nodata", "3") == 0
    data = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert list(data["bands"]) == [
        *("names", "dtype", "scale", "nodata", "nodata_share", "min", "max", "percentiles", "exact"),
    ]
    assert list(data["bands"]["percentiles"]) == ["1", "2", "50", "98", "99"]
