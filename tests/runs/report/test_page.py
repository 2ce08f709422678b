"""The page of a run: what it shows is what the run's files hold, whatever state they are in; its verdict on the run."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import SMALL_PRETRAIN, lines_of, one_line, summary_of
from markupsafe import escape

from mae_vit.cli.main import main
from mae_vit.core.urls import redacted
from mae_vit.pages import charts
from mae_vit.pretraining.command import main as pretrain
from mae_vit.pretraining.report.page import thinned, write_page
from mae_vit.pretraining.report.run_record import RunRecord, read_run
from mae_vit.pretraining.report.verdict import verdict
from mae_vit.training.outputs.run_folder import RunFolder


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    place = [f"data.path={digits}", f"run.dir={folder}", "monitor.evaluate_every_steps=1"]
    assert pretrain(["--config", "mae_digits", *SMALL_PRETRAIN, *place]) == 0
    return folder


@pytest.fixture
def run_folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "small")


def page_of(folder) -> str:
    """The page of a run folder."""
    return write_page(read_run(folder))


def change(path, **values):
    """Sets values in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_page_shows_what_the_files_hold(run_folder, capsys):
    assert main(["report", str(run_folder)]) == 0
    page, summary = (run_folder / "report.html").read_text(), summary_of(run_folder)
    held_out, probe = summary["heldout"], summary["probe"]
    for words, value in (
        ("held-out images: predicted pixels, PSNR in dB", f"{held_out['psnr_db']:.5g}"),
        ("online probe: linear layer, %", f"{100 * probe['few_shot_top1']:.5g}"),
        ("loss", f"{summary['loss']:.5g}"),
        ("images seen", f"{summary['samples']:,}"),
    ):
        assert f"<td>{words}</td><td>{value}</td>" in page
    assert not re.findall(r"<(?:td|h3)>[^< ]*_[^< ]*</(?:td><td|h3)>", page), "words, no keys"
    assert "Finished, 6 steps: " in page
    said = capsys.readouterr().out
    assert "verdict   Finished, 6 steps: " in said
    assert "Next: " in said
    plan = (run_folder / "plan.txt").read_text()
    assert "parameters  " in plan
    for line in plan.splitlines():
        assert escape(line[12:].strip()) in page, line
    environment = json.loads((run_folder / "environment.json").read_text())
    assert environment["packages"]["torch"] in page
    assert environment["git_commit"] in page
    assert '<figure class="wide"><svg' in page
    for title in ("predicted pixels, PSNR", "learning rate", "gradient norm", "images per second"):
        assert re.search(rf'<h3>{title}[^<]*</h3><div class="wide"><svg', page), title


def test_pictures_are_the_first_the_middle_and_the_last(run_folder):
    page, pictures = page_of(run_folder), sorted((run_folder / "pictures").iterdir())
    assert len(pictures) >= 2
    for path in (pictures[0], pictures[len(pictures) // 2], pictures[-1]):
        assert base64.b64encode(path.read_bytes()).decode() in page
    assert page.count("<img") == len({0, len(pictures) // 2, len(pictures) - 1})


def test_the_page_needs_nothing_beside_it_and_is_the_same_again(run_folder):
    page = page_of(run_folder)
    assert page == page_of(run_folder)
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert not re.search(r"url\((?!#)", page)
    assert "$" not in re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)


def test_a_chart_holds_no_text_that_is_not_set():
    """The labels of a logarithmic axis are TeX in matplotlib's comments."""
    with charts.chart("step", "") as (figure, axes):
        axes.semilogy([1, 2, 3], [1e-4, 1e-2, 1.0])
        drawn = charts.to_svg(figure)
    assert "<text" in drawn
    assert "$" not in drawn


def test_what_files_say_is_text_and_no_markup(run_folder):
    hostile = '"><script>alert(1)</script><img src=x onerror=y> $a$ \udcff'
    shown = hostile.encode("utf-8", "replace").decode()
    config = run_folder / "config.yaml"
    text = re.sub(r"(?m)^  name: mae_digits$", f"  name: {json.dumps(shown)}", config.read_text(), count=1)
    config.write_text(text)
    assert read_run(run_folder).name == shown
    change(run_folder / "summary.json", status=hostile, heldout={hostile: hostile})
    change(run_folder / "environment.json", processor=hostile, command=[hostile, f"x={hostile}"])
    (run_folder / "plan.txt").write_text(f"run         {shown}\nwarning: {shown}\n")
    (run_folder / "incidents").mkdir()
    for path in (run_folder / "incidents" / "step-00000003-1.json", run_folder / "quarantine.jsonl"):
        path.write_text(json.dumps({"reason": hostile, "key": hostile, "skipped_data_steps": [1, 2]}))
    lines = [
        {
            **line,
            "heldout": {hostile: line["loss"]},
            "probe": {f"{hostile}_top1": line["loss"], "b_top1": 1.0},
        }
        for line in lines_of(run_folder)
    ]
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["report", str(run_folder)]) == 0
    page = (run_folder / "report.html").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert page.count("&lt;script&gt;alert(1)") > 10
    # Nor is it a formula.
    assert re.search(r"<text[^>]*>[^<]*\$a\$[^<]*</text>", page)


def test_no_url_shows_a_password(run_folder):
    url = "https://me:pass-word@host/data?token=to-ken"
    config = run_folder / "config.yaml"
    config.write_text(re.sub(r"(?m)^  path: .*$", f"  path: {url}", config.read_text(), count=1))
    change(run_folder / "environment.json", command=["run.py", f"data.path={url}"])
    page = page_of(run_folder)
    assert "https://host/data" in page
    assert "pass-word" not in page
    assert "to-ken" not in page
    assert redacted({"a": [url, 3, f"k={url}", "x=1"]}) == {
        "a": ["https://host/data", 3, "k=https://host/data", "x=1"]
    }


@pytest.mark.parametrize(
    ("names", "torn", "expected"),
    [
        (
            ["config.yaml", "plan.txt", "environment.json", "pictures", "summary.json"],
            False,
            ["there is no config.yaml", "This run has no plan.txt", "In an unknown state, step 6: "],
        ),
        (
            ["metrics.jsonl"],
            False,
            ["there is no metrics.jsonl", "Finished, 6 steps: nothing was logged yet."],
        ),
        (["config.yaml", "metrics.jsonl", "plan.txt"], True, ["Finished, 6 steps"]),
        (
            ["environment.json", "summary.json"],
            True,
            ["environment.json cannot", "summary.json cannot be read"],
        ),
    ],
    ids=str,
)
def test_a_page_of_what_is_there(run_folder, names, torn, expected):
    for name in names:
        path = run_folder / name
        if torn:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    page = page_of(run_folder)
    for text in expected:
        assert text in page
    assert not any(path.name == "report.html" for path in run_folder.iterdir())


def test_a_run_without_a_logged_step_has_no_time_yet(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    change(run_folder / "summary.json", status="running", steps=0, wall_s=None, loss=None, images_per_s=None)
    page = page_of(run_folder)
    assert "<td>time</td><td>none</td>" in page
    assert "nothing was logged yet" in page


def test_incidents_and_damaged_samples_are_listed(run_folder):
    (run_folder / "incidents").mkdir()
    incident = {"step": 1234, "reason": "loss is nan", "loss": None, "grad_norm": 3.5, "back_to_step": 1200}
    (run_folder / "incidents" / "step-00001234-1.json").write_text(
        json.dumps({**incident, "try": 1, "skipped_data_steps": [1230, 1235]})
    )
    (run_folder / "incidents" / "step-00001300-1.json").write_text("{")
    damaged = [
        {"step": 2, "sample": n, "shard": "train-000001.tar", "key": f"k{n}", "offset": 512, "reason": "torn"}
        for n in range(60)
    ]
    (run_folder / "quarantine.jsonl").write_text("\n".join(map(json.dumps, damaged)))
    page = page_of(run_folder)
    assert "<h2>Incidents: 1</h2>" in page
    for cell in ("1,234", "loss is nan", "none", "3.5", "1,200", "1230 to 1234"):
        assert f">{cell}</td>" in page
    assert "<code>mae-vit replay RUN --data-step N</code>" in page
    assert "step-00001300-1.json" in page
    assert "<h2>Damaged samples: 60</h2>" in page
    assert ">k49</td>" in page
    assert ">k50</td>" not in page
    assert "10 more" in page


def test_what_is_no_run_is_one_line(run_folder, tmp_path, capsys, said):
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "results.csv").touch()
    for arguments in (
        *([tmp_path / "smal"], [tmp_path], [tmp_path / "compared"], [run_folder, "--out", tmp_path]),
        [run_folder, "--out", run_folder / "config.yaml" / "x.html"],
    ):
        assert main(["report", *map(str, arguments)]) == 2
        said(one_line(capsys))
    assert not list(tmp_path.rglob("*.html"))


def test_a_chart_of_a_long_run_is_small(run_folder):
    points = np.stack([np.arange(1, 5001), np.tile([0.0, 2.0], 2500)], axis=1)
    steps, middle, low, high = thinned(points)
    assert len(steps) <= 400
    assert steps[-1] == 5000
    assert (low.min(), high.max()) == (0.0, 2.0)
    assert np.allclose(middle, 1.0, atol=0.1)
    line = lines_of(run_folder)[-1]
    lines = [{**line, "step": step, "loss": 1 / step} for step in range(1, 3001)]
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.rmtree(run_folder / "pictures")
    assert len(page_of(run_folder)) < 400_000


# Of 100 steps: one that flattens, one that does not, one of noise.
FLAT = (0.4 + 0.6 * np.exp(-np.arange(100) / 12)).tolist()
STEEP = np.linspace(1.0, 0.5, 100).tolist()
NOISE = (0.7 + 0.003 * np.sin(np.arange(100) * 2.4)).tolist()
LEARNED, UNLEARNED, COLLAPSED = "its features improved", "its features got worse", "it collapsed"
LONG_ENOUGH, TOO_SHORT = "was long enough", "was not long"


def verdict_of(losses, probe=None, start=None, rankme=None) -> str:
    """The verdict of a finished run with these losses, one a step, and a probe at its end."""
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    if probe is not None:
        lines[-1]["probe"] = {"few_shot_top1": probe}
    if rankme is not None:
        lines[-1]["heldout"] = {"rankme": rankme}
    summary = {"status": "done", "steps": len(lines), "total_steps": len(lines)}
    if start is not None:
        summary["probe_at_start"] = {"few_shot_top1": start[0], "images": start[1]}
    return str(verdict(RunRecord(Path("runs/a"), summary=summary, lines=tuple(lines))))


def test_a_loss_below_zero_leaves_no_half_sentence():
    answer, _ = verdict_of([loss - 2 for loss in FLAT]).split("\n", 1)
    assert re.fullmatch(r"[^:]*\.", answer)


@pytest.mark.parametrize(
    ("run", "named", "unnamed"),
    [
        (
            (FLAT, 0.5, (0.3, 500)),
            (LEARNED, "50.0%", "45.6% to 54.4%", "30.0%", "1 to 0.4", LONG_ENOUGH, "mae-vit finetune"),
            (),
        ),
        ((STEEP, 0.5, (0.3, 500)), (LEARNED, TOO_SHORT, "run.name=longer"), ()),
        # Of a loss from 0.7005 to 0.698, and 24.7 % of 150 images against 22.7 %, nobody knows more.
        (
            (NOISE, 0.247, (0.227, 150)),
            ("18.5% to 32.2%", "22.7%", "0.0% less", "100 steps are few"),
            (LEARNED, UNLEARNED, "mode=knn"),
        ),
        ((FLAT * 10, 0.3, (0.3, 500)), ("mode=knn",), (LEARNED, UNLEARNED)),
        ((NOISE,), ("mae-vit replay runs/a",), (LONG_ENOUGH,)),
        ((STEEP[::-1],), ("loss rose from 0.5 to 0.9773, 95.5% more",), ("fell from", "run.name=longer")),
        (([0.0] * 100,), ("Finished",), ()),
        ((FLAT, 0.2, (0.5, 500)), (UNLEARNED,), (LEARNED, LONG_ENOUGH)),
        ((FLAT, 0.32, (0.3, 150)), ("not clearly better", "100 steps are few"), (LONG_ENOUGH,)),
        # At the end of the scale, where rounding has a say.
        ((FLAT, 1.0, (1.0, 4)), ("100.0%",), (LEARNED, UNLEARNED)),
        # The beginning is not known of a run whose folder was resumed from elsewhere.
        ((FLAT, 0.5), ("50.0%",), (LEARNED, "%)")),
        ((FLAT, 0.5, (0.3, 500), 1.4), (COLLAPSED,), (LEARNED,)),
        ((FLAT, 0.5, (0.3, 500), 2.9), (LEARNED,), (COLLAPSED,)),
        # More of the same would not mend it.
        ((STEEP, None, None, 1.4), (COLLAPSED,), ("run.name=longer",)),
        # Hardly trained: nothing collapsed yet.
        ((FLAT[:12], None, None, 1.4), ("run.name=longer",), (COLLAPSED,)),
    ],
)
def test_the_verdict_of_a_run(run, named, unnamed):
    text = verdict_of(*run)
    assert [part for part in named if part not in text] == [], text
    assert [part for part in unnamed if part in text] == [], text


@pytest.mark.parametrize("key", ["steps", "epochs", "samples"])
def test_a_longer_run_is_proposed_by_the_key_of_this_one(key):
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(STEEP, 1)]
    config = {"train": {"steps": None, "epochs": None, "samples": None, key: 9}}
    record = RunRecord(Path("runs/a"), config=config, summary={"status": "done"}, lines=tuple(lines))
    assert f"a larger train.{key}," in verdict(record).next


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_each_state_is_named(run_folder, status):
    lines = lines_of(run_folder)[:4]
    lines[2]["loss"] = None  # fp16 has skipped it
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo')
    change(run_folder / "summary.json", status=status, steps=4)
    page = page_of(run_folder)
    killed = status == "running"
    assert re.search(rf"{'Killed' if killed else status.capitalize()}[^.]* step 4 of 6", page)
    assert ("Next: " in page) == (status == "failed")
    if killed:
        with RunFolder(run_folder) as folder:
            folder.lock()
            assert re.search(r"Running[^.]* step 4 of 6", page_of(run_folder))


def test_a_run_measures_the_weights_that_it_begins_with(run_folder):
    """So that the accuracy of its probe has something to stand beside."""
    start, probe = summary_of(run_folder)["probe_at_start"], summary_of(run_folder)["probe"]
    assert start.keys() - probe.keys() == {"images"}
    assert start["images"] > 0
    assert f"before training {start['few_shot_top1']:.1%}" in page_of(run_folder)


def test_axes_reach_zero(run_folder):
    """Those of a single evaluation too."""
    lines = lines_of(run_folder)
    for line in lines[:-1]:
        line.pop("heldout", None)
    for line in lines:
        line["loss"] = 0.7 + 1e-3 * (line["step"] % 2)
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = page_of(run_folder)
    for chart in (r'<figure class="wide">(<svg.*?</svg>)', r"<h3>effective rank.*?(<svg.*?</svg>)"):
        drawn = re.search(chart, page, re.DOTALL)[1]
        axes = (re.findall(r"<text[^>]*>([\d.]+)</text>", part) for part in drawn.split("matplotlib.axis_2"))
        steps, values = ([float(tick) for tick in ticks] for ticks in axes)
        assert (steps[0], steps[-1], values[0]) == (0, 6, 0)
