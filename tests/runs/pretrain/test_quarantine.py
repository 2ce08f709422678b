"""The sample budget: damaged samples are replaced, listed and counted; over the budget the run stops and says why."""

import errno
import json
import os
from dataclasses import asdict

import pytest
from helpers.commands import cut_back, saved_steps, summary_of
from helpers.damage import WAYS, copy_of, damage, keys_of, known_key

from mae_vit.core.errors import Damage
from mae_vit.data import training_data
from mae_vit.data.index import open_index
from mae_vit.runtime.ranks import Ranks
from mae_vit.training import recovery
from mae_vit.training.recovery import Quarantine

# 1 % of 1,497 samples, in five ways.
BAD = {57 + 99 * number: list(WAYS)[number % 5] for number in range(15)}
# An epoch of three steps, which takes every sample.
LONG = [
    *("train.effective_batch_size=499", "train.steps=3", "checkpoint.every_steps=1"),
    *("checkpoint.keep_last=9", "monitor.evaluate_every_steps=3", "monitor.evaluate_images=16"),
    *("monitor.probe_queries=0", "model.patch_size=4"),
]
TAR = "data.source=tar"


@pytest.fixture(scope="module")
def damaged(digits, tmp_path_factory):
    """A copy of the digits with damaged samples."""
    copy = copy_of(digits, tmp_path_factory.mktemp("damaged") / "data")
    damage(digits, copy, BAD)
    return copy


@pytest.fixture
def order(monkeypatch):
    """Notes the samples of each batch that is loaded, in order."""
    noted, load = [], training_data.load_batches

    def loading(*arguments, **options):
        for batch in load(*arguments, **options):
            noted.append(batch.keys.index.tolist())
            yield batch

    monkeypatch.setattr(training_data, "load_batches", loading)
    return noted


def listed(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def test_within_the_budget_the_run_ends_and_lists_exactly_what_is_damaged(
    call, digits, damaged, tmp_path, order, capsys
):
    assert call(*LONG, name="healthy") == 0
    assert not (tmp_path / "healthy" / "quarantine.jsonl").exists()
    assert "damaged_samples" not in summary_of(tmp_path / "healthy")
    healthy, keys = order.copy(), keys_of(digits)
    assert sorted(sample for batch in healthy for sample in batch) == list(range(1497))
    shards = open_index(digits, "train").split_info.shards
    for source in ("memory", "tar"):
        order.clear()
        capsys.readouterr()
        options = [f"data.path={damaged}", "data.damage_budget=0.02", f"data.source={source}"]
        assert call(*LONG, *options, name=source) == 0
        assert order == healthy
        lines = listed(tmp_path / source)
        assert sorted(line["sample"] for line in lines) == sorted(BAD)
        for line in lines:
            way, shard = BAD[line["sample"]], shards[line["sample"] // 400].file
            assert (line["key"], line["shard"]) == (known_key(keys[line["sample"]], way), shard)
            assert WAYS[way] in line["reason"]
            assert line["offset"] > 0
            assert line["sample"] in healthy[line["step"] - 1]
        assert summary_of(tmp_path / source)["damaged_samples"] == len(BAD)
        warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        assert sum("shard train-" in line for line in warnings) == 10


def test_by_default_the_second_damaged_sample_of_1497_is_too_many(call, digits, tmp_path, capsys):
    for bad in ([3], [3, 4]):
        copy, folder = copy_of(digits, tmp_path / f"{len(bad)}"), tmp_path / f"run-{len(bad)}"
        damage(digits, copy, dict.fromkeys(bad, "undecodable"))
        options = [*LONG, f"data.path={copy}", TAR]
        capsys.readouterr()
        assert call(*options, name=folder.name) == len(bad) - 1
        assert sorted(line["sample"] for line in listed(folder)) == bad
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    place = (str(folder / "quarantine.jsonl"), f"`mae-vit check {copy}`")
    for said in ("2 of 1,497 ", "data.damage_budget=0.001 allows 1", *place):
        assert said in error
    assert (summary_of(folder)["status"], summary_of(folder)["damaged_samples"]) == ("failed", 2)
    assert call(*options, "data.damage_budget=0", name="none") == 1
    assert "damage_budget=0 allows 0;" in capsys.readouterr().err


def test_a_resumed_run_counts_on_and_repeats_no_line(call, damaged, digits, tmp_path, capsys):
    options = [*LONG, f"data.path={damaged}", "data.damage_budget=0.02", TAR]
    assert call(*options) == 0
    folder = tmp_path / "run"
    before = (folder / "quarantine.jsonl").read_bytes()
    first = [line for line in listed(folder) if line["step"] == 1]
    assert 0 < len(first) < len(BAD) - 1
    cut_back(folder, 1)
    with (folder / "quarantine.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "sam')
    assert call(*options) == 0
    assert (folder / "quarantine.jsonl").read_bytes() == before
    assert summary_of(folder)["damaged_samples"] == len(BAD)
    # Those of before count: the budget is the run's, and may be another now.
    cut_back(folder, 1)
    capsys.readouterr()
    assert call(*options, f"data.damage_budget={(len(BAD) - 1) / 1497}") == 1
    assert "15 of 1,497 " in capsys.readouterr().err
    assert call(*options, "data.damage_budget=0.005") == 2
    assert "quarantine.jsonl" in capsys.readouterr().err
    # With mended shards it goes on from its last save.
    kept = saved_steps(folder)[-1]
    assert call(*options, f"data.path={digits}") == 0
    assert {line["step"] for line in listed(folder)} == set(range(1, kept + 1))


def test_the_list_takes_hostile_lines_and_names(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    lines = ['{"step": 1}', "[]", "3", '{"step": [], "sample": 1}', '{"step": 2, "sample": 5, "more": 1}', ""]
    path.write_text("\n".join(lines))
    options = {"share": 0.5, "samples": 3, "data_path": "data"}
    quarantine = Quarantine(path, Ranks(), start_step=9, **options)
    assert (list(quarantine.samples), path.exists()) == ([], False)
    hostile = Damage(1, "a.tar", "x\udcff\x1b[2J\n", None, "not an image")
    assert quarantine.note(4, [hostile, hostile]) == 1
    assert quarantine.note(5, [hostile]) == 0
    assert not list(quarantine.samples)
    assert quarantine.exchange() == [hostile]
    assert quarantine.exchange() == []
    assert not quarantine.excess
    assert len(path.read_bytes().splitlines()) == 1
    again = Quarantine(path, Ranks(), start_step=4, **options)
    assert list(again.samples) == [1]
    assert again.note(6, [hostile]) == 0
    assert again.note(6, [Damage(2, "a.tar", None, 3, "gone")]) == 1
    again.exchange()
    assert "allows 1;" in again.excess
    assert os.linesep.join(map(str, [hostile])).isprintable()


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    options = {"share": 0.5, "samples": 3, "data_path": "data"}
    quarantine = Quarantine(tmp_path / "q", Ranks(), start_step=0, **options)
    damage = Damage(1, "a.tar", "x", None, "not an image")
    quarantine.note(4, [damage])
    line = json.dumps({"step": 4, **asdict(damage)})
    (tmp_path / "again").write_text(line)
    monkeypatch.setattr(recovery, "fsync_path", lambda path: None)
    monkeypatch.setattr(os, "fsync", full)
    assert quarantine.exchange() == [damage]
    # Nor does it keep one from going on.
    assert list(Quarantine(tmp_path / "again", Ranks(), start_step=4, **options).samples) == [1]
