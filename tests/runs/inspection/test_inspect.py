"""The whole command: on a run, on an encoder alone, on two; and what it refuses."""

import re
import shutil
from html import unescape

import pytest
import torch
from helpers.commands import SMALL_MAE, csv_rows, one_line
from helpers.encoders import info_of
from helpers.images import encoded, picture, write_files
from helpers.weights.official_weights import official
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.inspection.images import draw_samples
from mae_vit.inspection.inspect import open_subject
from mae_vit.inspection.reconstructions import reconstruct
from mae_vit.objectives.mae import MAE
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.weights.encoder import load_encoder

GRAY = info_of(in_chans=1, img_size=(8, 8))
SMALL = [*SMALL_MAE, "train.steps=6", "train.warmup_steps=1", "monitor.evaluate_images=32"]
SMALL += ["monitor.probe_queries=0", "monitor.tensorboard=false"]
EVERYWHERE = {"attention-distance.csv", "attention-entropy.png", "attention-rollout.png", "features.png"}


@pytest.fixture(scope="module")
def runs(digits, tmp_path_factory):
    """A trained MAE and a trained mean-color run on the digits."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mae", "masked_patch"):
        options = [word for word in SMALL if name == "mae" or not word.startswith("objective.")]
        words = ["--config", f"{name}_digits", *options, f"data.path={digits}", f"run.dir={folder / name}"]
        assert not pretrain_main(words)
    return folder


@pytest.fixture(scope="module")
def looked(runs, digits):
    assert main(["inspect", str(runs / "mae"), "--images", "120"]) == 0
    return runs / "mae" / "inspect"


def test_a_run_is_looked_at_with_its_own_data(looked):
    there = {path.name for path in looked.iterdir()}
    assert there >= EVERYWHERE
    page = (looked / "index.html").read_text()
    assert 'split "test"' in unescape(page)
    for path in looked.glob("*.png"):
        assert page.count(path.name) == 2  # a link and its text
        assert min(Image.open(path).size) > 20
    drawn = page.count("data:image/png;base64,") + page.count("<svg")
    assert drawn == len(list(looked.glob("*.png")))
    # Its run, and one sentence.
    assert "<h1>mae_digits</h1>" in page
    assert re.search(r'<p class="headline">mae_digits predicts pixels [^<]* and looks [^<]*\.</p>', page)
    assert not list(looked.parent.glob(".inspect*"))


def test_numbers_are_there_for_each_head_and_mask(looked):
    heads = csv_rows(looked / "attention-distance.csv")
    assert len(heads) == 2  # one block of two heads
    assert all(0 < float(row["mean_attention_distance_px"]) < 12 for row in heads)
    masks = csv_rows(looked / "reconstructions-random.csv")
    assert [(row["mask"], row["ratio"]) for row in masks] == [
        (kind, str(ratio)) for kind in ("random", "block", "grid") for ratio in (0.5, 0.75, 0.9)
    ]
    assert len({row["psnr_db"] for row in masks}) >= 8  # one visible patch may be the same one


def test_a_config_of_another_program_beside_an_encoder_is_no_run(runs, tmp_path):
    shutil.copy(runs / "mae" / "encoder.safetensors", tmp_path)
    (tmp_path / "config.yaml").write_text("monitor: 3\nepochs: 9\n")
    assert open_subject(str(tmp_path)).title == tmp_path.name


def test_what_is_assumed_about_weights_is_said(tmp_path, capsys):
    decoder = {"decoder_embed_dim": 512, "decoder_depth": 1, "decoder_num_heads": 16}
    official(tmp_path / "mae.pth", decoder=True, width=128, depth=6, **decoder)
    assert open_subject(str(tmp_path / "mae.pth")).objective is not None
    notes = capsys.readouterr().err
    for assumed in ("num_heads=4", "ImageNet's normalization", "norm_pix_loss=false"):
        assert assumed in notes


def test_random_masks_as_trained_say_what_training_says(runs, digits):
    subject = open_subject(str(runs / "mae"))
    assert isinstance(subject.objective, MAE)
    batch = draw_samples(str(digits), count=64, encoder=GRAY).batch(64)
    (reconstruction,) = [
        item
        for item in reconstruct(subject.objective, batch, shown=2)
        if (item.kind, item.ratio) == ("random", 0.75)
    ]
    with torch.no_grad():
        sums = {name: float(value) for name, value in subject.objective.evaluation_sums(batch).items()}
    expected = subject.objective.evaluation_metrics(sums)
    assert reconstruction.metrics["psnr_db"] == pytest.approx(expected["psnr_db"], abs=1e-5)
    assert reconstruction.metrics["psnr_gain_db"] == pytest.approx(expected["psnr_gain_db"], abs=1e-5)
    assert all(len(row.images) == 2 for row in reconstruction.rows)


def test_without_masks_there_is_nothing_to_reconstruct(digits, tmp_path):
    options = [word for word in SMALL if not word.startswith("objective.")]
    options += ["objective={name: contrastive, group_size: 8}", "data.repeats=2", f"data.path={digits}"]
    options.append("data.augment.crop=random_resized")
    assert not pretrain_main(["--config", "mae_digits", *options, f"run.dir={tmp_path}"])
    subject = open_subject(str(tmp_path))
    assert (subject.objective, subject.why_no_objective) == (None, "it was trained without masks")


def test_two_side_by_side_and_an_encoder_alone(runs, digits, tmp_path, capsys):
    out = tmp_path / "pair"
    encoder = str(runs / "masked_patch" / "encoder.safetensors")
    arguments = [encoder, "--against", str(runs / "mae"), "--data", str(digits), "--out", str(out)]
    assert main(["inspect", *arguments, "--images", "30"]) == 0
    assert str(out / "index.html") in capsys.readouterr().out
    page = (out / "index.html").read_text()
    assert page.count("No such picture") == 3  # the encoder alone reconstructs with no kind of mask
    assert (out / "a" / "positions.png").is_file()
    assert (out / "b" / "reconstructions-grid.png").is_file()


def test_a_folder_of_photographs_with_a_broken_one(runs, tmp_path):
    photos = {f"{'ab'[n % 2]}/{n}.png": encoded(picture(n, (30, 20)), "png") for n in range(12)}
    folder = write_files(tmp_path / "photos", photos | {"broken.png": b"\x89PNG\r\n\x1a\nbroken"})
    out = tmp_path / "look"
    arguments = [str(runs / "mae"), "--data", str(folder), "--out", str(out), "--images", "13"]
    assert main(["inspect", *arguments]) == 0
    page = (out / "index.html").read_text()
    assert "12 images" in page
    assert "passed over" in page
    assert main(["inspect", *arguments]) == 0  # replaces its own
    (out / "own.txt").touch()
    assert main(["inspect", *arguments]) == 2  # and nothing else
    assert (out / "own.txt").exists()
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").touch()
    for place in (site, site / "index.html"):
        arguments[4] = str(place)
        assert main(["inspect", *arguments]) == 2
    assert (site / "index.html").exists()


def test_the_history_of_a_run_is_its_own(runs, tmp_path):
    """An encoder that lies one folder above a file is another's."""
    model = load_encoder(runs / "mae")
    assert (model.info.objective, model.info.step, model.info.images_seen) == ("mae", 6, 6 * 128)
    (tmp_path / "sub").mkdir()
    (tmp_path / "encoder.safetensors").write_bytes((runs / "mae" / "encoder.safetensors").read_bytes())
    size = info_of(in_chans=1, embed_dim=128, depth=6)
    torch.save({"model": size.geometry.build().state_dict()}, tmp_path / "sub" / "foreign.pth")
    foreign = load_encoder(tmp_path / "sub" / "foreign.pth")
    assert (foreign.info.objective, foreign.info.step) == ("unknown", 0)
    assert foreign.info.mean == pytest.approx([0.449], abs=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        *("nowhere", "", "{data}", "{encoder} --data {data}", "{encoder} --out {out}"),
        *("{encoder} --out {out} --data {data} --images 1", "{encoder} --out {out} --data nodata"),
        "{encoder} --out {out} --data {data} --split tset",
    ],
)
def test_what_does_not_fit_is_one_line(runs, digits, tmp_path, capsys, words, said):
    places = {"encoder": runs / "mae" / "encoder.safetensors", "data": digits, "out": tmp_path / "out"}
    assert main(["inspect", *words.format(**places).split()]) == 2
    said(one_line(capsys))
    assert not (tmp_path / "out").exists()


def test_fewer_images_are_the_first_of_more(digits):
    more, fewer = (draw_samples(str(digits), count=count, encoder=GRAY) for count in (150, 20))
    assert torch.equal(fewer.images, more.images[:20])
