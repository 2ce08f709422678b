"""Small real files of bands: which are taken, and which are refused with which line."""

import io
from dataclasses import dataclass

import numpy as np
import pydicom
import tifffile
from PIL import Image
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, RLELossless

SIZE = (40, 56)


def values(count: int, dtype: str, low: float = 1, high: float = 4000) -> np.ndarray:
    """Returns an image (C, H, W) that varies smoothly, each band differently."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    waves = [np.sin(rows / 7 + n) * np.cos(columns / (5 + n)) for n in range(count)]
    scaled = low + (np.stack(waves) + 1) / 2 * (high - low)
    return (scaled if dtype.startswith("float") else np.rint(scaled)).astype(dtype)


@dataclass(frozen=True)
class BandFile:
    """A file, and what becomes of it.

    Attributes:
        name: what it is, for the documentation.
        extension: of its name.
        data: its bytes.
        kind: bands and type that it becomes; "8-bit" for gray and RGB, None if it is refused.
        pixels: what is read, (C, H, W).
        written: extension under which it is stored.
    """

    name: str
    extension: str
    data: bytes
    kind: str | None = None
    pixels: np.ndarray | None = None
    written: str = ""


def tiff(array: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **{"photometric": "minisblack", **options})
    return stream.getvalue()


def chunky(array: np.ndarray, **options) -> bytes:
    return tiff(array.transpose(1, 2, 0), planarconfig="contig", **options)


def planes(array: np.ndarray, **options) -> bytes:
    return tiff(array, planarconfig="separate", **options)


def pages(*arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        for array in arrays:
            file.write(array, photometric="minisblack" if array.ndim == 2 else "rgb")
    return stream.getvalue()


def npy(array: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def png(array: np.ndarray) -> bytes:
    """Encodes 16 bits; Pillow writes gray alone."""
    if array.shape[0] == 1:
        stream = io.BytesIO()
        Image.fromarray(array[0]).save(stream, "png")
        return stream.getvalue()
    import imagecodecs

    return bytes(imagecodecs.png_encode(np.ascontiguousarray(array.transpose(1, 2, 0))))


def dicom(
    array: np.ndarray, *, color: str = "MONOCHROME2", bits: int | None = None, compress=None, **tags
) -> bytes:
    """Writes frames (N, H, W) or RGB (3, H, W)."""
    samples = 3 if color == "RGB" else 1
    dataset = pydicom.Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3.4"
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.Rows, dataset.Columns = array.shape[1:]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = samples, color
    dataset.BitsAllocated = 8 * array.itemsize
    dataset.BitsStored = bits or dataset.BitsAllocated
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(array.dtype.kind == "i")
    if samples == 3:
        dataset.PlanarConfiguration = 0
        array = array.transpose(1, 2, 0)
    elif len(array) > 1:
        dataset.NumberOfFrames = len(array)
    dataset.PixelData = np.ascontiguousarray(array).tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    if compress is not None:
        dataset.compress(compress)
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def sequence(items: list[dict]) -> pydicom.Sequence:
    """Writes nested lists of tags as DICOM's sequences."""
    made = pydicom.Sequence()
    for item in items:
        made.append(pydicom.Dataset())
        for name, value in item.items():
            setattr(made[-1], name, sequence(value) if isinstance(value, list) else value)
    return made


def make_files() -> list[BandFile]:
    """Returns all files."""
    wide = values(13, "uint16")
    byte = values(13, "uint8", 0, 255)
    real = values(3, "float32", -2, 3)
    gaps = real.copy()
    gaps[:, :3] = np.nan
    signed = values(2, "int16", -1024, 3071)
    taken = refuse = BandFile
    rgb8, rgb16 = byte[:3], wide[:3]
    gdal = '<GDALMetadata><Item name="DESCRIPTION" sample="{}" role="description">{}</Item></GDALMetadata>'
    groups = [
        {"PixelValueTransformationSequence": [{"RescaleSlope": 1, "RescaleIntercept": n}]} for n in (-1024, 9)
    ]
    shared, differing = [sequence(groups[:1]), sequence(groups)]
    black, stream = byte[:1] > 99, io.BytesIO()
    first, second = (Image.fromarray(page) for page in (black[0], ~black[0]))
    first.save(stream, "tiff", save_all=True, append_images=[second], compression="group4")
    fax = stream.getvalue()
    names = "".join(gdal.format(n, name)[14:-15] for n, name in enumerate(("B4", "B3", "B2")))
    described = [(42112, "s", 0, f"<GDALMetadata>{names}</GDALMetadata>", True), (42113, "s", 0, "0", True)]
    # Six gradients in different directions: like pictures, smooth along each row of 28 pixels and unlike each other.
    slopes = np.random.default_rng(0).uniform(-4, 4, (6, 2, 1, 1))
    rows, columns = np.mgrid[:28, :28]
    flat = (128 + slopes[:, 0] * (rows - 14) + slopes[:, 1] * (columns - 14)).astype(np.uint8).reshape(6, 784)
    ramp = np.tile(np.arange(256, dtype=np.uint16), (20, 1))
    return [
        taken("TIFF, 13 pages of uint16", "tif", tiff(wide), "13xuint16", wide),
        taken("TIFF, 13 planes of uint16", "tif", planes(wide), "13xuint16", wide),
        taken("TIFF, 13 x uint16 side by side", "tif", chunky(wide), "13xuint16", wide),
        taken("TIFF, 13 x uint16 in tiles", "tif", chunky(wide, tile=(16, 32)), "13xuint16", wide),
        taken("TIFF, 13 planes in tiles, Deflate", "tif", planes(wide, tile=(16, 16), compression="zlib"),
              "13xuint16", wide),
        taken("TIFF, strips, Deflate, predictor", "tif",
              chunky(wide, compression="zlib", predictor=True, rowsperstrip=7), "13xuint16", wide),
        taken("TIFF, LZW", "tif", planes(wide, compression="lzw"), "13xuint16", wide),
        taken("TIFF, Zstandard", "tif", chunky(wide, compression="zstd"), "13xuint16", wide),
        taken("TIFF, LZMA", "tif", tiff(wide, compression="lzma"), "13xuint16", wide),
        taken("TIFF, PackBits", "tif", tiff(wide, compression="packbits"), "13xuint16", wide),
        taken("TIFF, big endian", "tif", tiff(wide, byteorder=">"), "13xuint16", wide),
        taken("BigTIFF", "tif", chunky(wide, bigtiff=True), "13xuint16", wide),
        taken("ImageJ stack of 13 x uint16", "tif", tiff(wide, imagej=True), "13xuint16", wide),
        taken("OME-TIFF, 2 x uint16, named channels", "tif",
              tiff(wide[:2], ome=True, metadata={"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP"]}}),
              "2xuint16", wide[:2]),
        taken("GeoTIFF, 3 x uint16 with GDAL's names and no-data", "tif", planes(rgb16, extratags=described),
              "3xuint16", rgb16),
        taken("TIFF, gray uint16", "tif", tiff(wide[0]), "1xuint16", wide[:1]),
        taken("TIFF, gray uint16, white is zero", "tif", tiff(wide[0], photometric="miniswhite"), "1xuint16",
              np.uint16(65535) - wide[:1]),
        taken("TIFF, RGB uint16", "tif", chunky(rgb16, photometric="rgb"), "3xuint16", rgb16),
        taken("TIFF, RGB and near infrared, uint16", "tif",
              chunky(wide[:4], photometric="rgb", extrasamples=["unspecified"]), "4xuint16", wide[:4]),
        taken("TIFF, RGB and near infrared, uint8", "tif",
              chunky(byte[:4], photometric="rgb", extrasamples=["unspecified"]), "4xuint8", byte[:4]),
        taken("TIFF, RGB uint16 with transparency, which is dropped", "tif",
              chunky(wide[:4], photometric="rgb", extrasamples=["unassalpha"]), "3xuint16", rgb16),
        taken("TIFF, 13 pages of uint8", "tif", tiff(byte), "13xuint8", byte),
        taken("TIFF, 2 x int16", "tif", planes(signed), "2xint16", signed),
        taken("TIFF, 3 x float32", "tif", tiff(gaps), "3xfloat32", gaps),
        taken("TIFF, 3 x float32, floating-point predictor", "tif",
              tiff(real, compression="zlib", predictor=True), "3xfloat32", real),
        taken("TIFF, 3 x float16", "tif", tiff(gaps.astype(np.float16)), "3xfloat16", gaps.astype(np.float16)),
        taken("TIFF, RGB uint8", "tif", chunky(rgb8, photometric="rgb"), "8-bit", rgb8),
        taken("TIFF, gray uint8", "tif", tiff(byte[0]), "8-bit", byte[:1]),
        taken("TIFF, 2 pages of 1 bit, of which the first is used", "tif", fax, "8-bit", np.uint8(255) * black),
        taken("NPY (C, H, W), uint16", "npy", npy(wide), "13xuint16", wide),
        taken("NPY (H, W, C), uint16", "npy", npy(wide.transpose(1, 2, 0)), "13xuint16", wide),
        taken("NPY (H, W), long, W a square", "npy", npy(ramp), "1xuint16", ramp[None]),
        taken("NPY (H, W), float16", "npy", npy(real[0].astype(np.float16)), "1xfloat16", real[:1].astype(np.float16)),
        taken("NPY, Fortran order, big endian, int16", "npy", npy(np.asfortranarray(signed).astype(">i2")),
              "2xint16", signed),
        taken("NPY (H, W, 3), uint8", "npy", npy(rgb8.transpose(1, 2, 0)), "3xuint8", rgb8),
        taken("NPZ of one array, float32", "npz", npz(a=real), "3xfloat32", real),
        taken('NPZ of several, one named "image"', "npz", npz(image=wide, label=np.arange(3)), "13xuint16", wide),
        taken("PNG, gray uint16", "png", png(wide[:1]), "1xuint16", wide[:1]),
        taken("PNG, RGB uint16", "png", png(rgb16), "3xuint16", rgb16),
        taken("PNG, gray uint16 with transparency, which is dropped", "png", png(wide[:2]), "1xuint16", wide[:1]),
        taken("PNG, RGB uint16 with transparency, which is dropped", "png", png(wide[:4]), "3xuint16", rgb16),
        taken("DICOM, 12 bits in uint16", "dcm", dicom(wide[:1], bits=12), "1xuint16", wide[:1]),
        taken("DICOM, int16", "dcm", dicom(signed[:1]), "1xint16", signed[:1]),
        taken("DICOM, Hounsfield units by slope 1 and intercept -1024", "dcm",
              dicom(wide[:1], RescaleSlope=1, RescaleIntercept=-1024), "1xint16",
              (wide[:1].astype(np.int32) - 1024).astype(np.int16)),
        taken("DICOM, 2 frames, intercept -1024 of both", "dcm", dicom(wide[:2], SharedFunctionalGroupsSequence=shared),
              "2xint16", (wide[:2].astype(np.int32) - 1024).astype(np.int16)),
        taken("DICOM, slope 0.5", "dcm", dicom(wide[:1], RescaleSlope=0.5, RescaleIntercept=0), "1xfloat32",
              wide[:1] * np.float32(0.5)),
        taken("DICOM, MONOCHROME1 of 12 bits, inverted", "dcm", dicom(wide[:1], bits=12, color="MONOCHROME1"),
              "1xuint16", np.uint16(4095) - wide[:1]),
        taken("DICOM, 13 frames, RLE", "dcm", dicom(wide, compress=RLELossless), "13xuint16", wide),
        taken("DICOM, gray uint8", "dcm", dicom(byte[:1]), "8-bit", byte[:1], written="png"),
        taken("DICOM, RGB uint8", "dcm", dicom(rgb8, color="RGB"), "8-bit", rgb8, written="png"),
        refuse("TIFF, float64", "tif", tiff(real.astype(np.float64))),
        refuse("TIFF, uint32", "tif", tiff(wide.astype(np.uint32))),
        refuse("TIFF, int8", "tif", tiff(signed.astype(np.int8))),
        refuse("TIFF, complex", "tif", tiff(real.astype(np.complex64))),
        refuse("TIFF, 13 x uint16 as JPEG 2000", "tif", planes(wide, compression="jpeg2000")),
        refuse("TIFF, 2 pages of 3 x uint16", "tif", pages(rgb16.transpose(1, 2, 0), rgb16.transpose(1, 2, 0))),
        refuse("TIFF, pages of different sizes, uint16", "tif", pages(wide[0], wide[0, :20])),
        refuse("TIFF, 600 pages", "tif", tiff(np.zeros((600, 4, 4), np.uint16))),
        refuse("TIFF, truncated", "tif", planes(wide)[:9000]),
        refuse("NPY of Python objects", "npy", npy(np.array([[{}]], object), allow_pickle=True)),
        refuse("NPY of flat images, (N, K * K)", "npy", npy(flat)),
        refuse("NPY of images, (N, K, K)", "npy", npy(np.zeros((9, 8, 8), np.uint8))),
        refuse("NPY of 4 axes", "npy", npy(wide[None])),
        refuse("NPY, int64", "npy", npy(wide.astype(np.int64))),
        refuse("NPY, truncated", "npy", npy(wide)[:-1]),
        refuse("NPZ of two arrays", "npz", npz(a=wide, b=wide)),
        refuse("float32 with infinite values", "npy", npy(np.where(real > 2.9, np.inf, real).astype(np.float32))),
        refuse("DICOM of palette colors", "dcm", dicom(byte[:1], color="PALETTE COLOR")),
        refuse("DICOM, 2 frames of different units", "dcm",
               dicom(wide[:2], PerFrameFunctionalGroupsSequence=differing)),
        refuse("DICOM without pixels", "dcm", dicom(byte[:1]).replace(b"\xe0\x7f\x10\x00", b"\xe1\x7f\x10\x00")),
    ]  # fmt: skip
