"""Run folders behind a URL: what counts as a checkpoint there, and what a start takes over."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch

from mae_vit.config.schema import GuardSection
from mae_vit.core.errors import RemoteError, RemoteUnavailable
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints import checkpoint
from mae_vit.training.checkpoints.checkpoint import (
    BrokenCheckpoint,
    list_checkpoints,
    load_checkpoint,
    load_together,
    save_checkpoint,
)
from mae_vit.training.checkpoints.remote import RemoteRun
from mae_vit.training.engines.state import TrainState
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.recovery import Quarantine, Recovery


def state(value: float) -> TrainState:
    return TrainState({"weight": torch.full((5,), value)}, {}, 1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a checkpoint of step 1 and of step 2, and its files in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RemoteRun(f"memory://{uuid4().hex}/run")
    run.local.mkdir(parents=True)
    (run.local / "metrics.jsonl").write_text("{}\n")
    (run.local / "config.yaml").touch()
    for step in (1, 2):
        save(run, step)
    run.upload_files()
    return run


@pytest.fixture
def elsewhere(run, tmp_path, monkeypatch):
    """The same run on a machine that has nothing of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    again = RemoteRun(run._url)
    again.local.mkdir(parents=True)
    return again


def save(run: RemoteRun, step: int) -> None:
    run.upload_checkpoint(
        save_checkpoint(run.local / "checkpoints", step=step, state=state(step), identity={})
    )


def steps(run: RemoteRun) -> list[int]:
    return [load_checkpoint(path).step for path in list_checkpoints(run.local / "checkpoints")]


def there(run: RemoteRun) -> set[str]:
    return {*run._names()}


def damage(run: RemoteRun, name: str, data: bytes | None = None) -> None:
    path = run._path(f"checkpoints/{name}")
    run._fs.pipe_file(path, data) if data is not None else run._fs.rm_file(path)


def test_a_start_elsewhere_has_the_files_and_the_newest_checkpoint(run, elsewhere):
    elsewhere.fetch()
    assert steps(elsewhere) == [2]
    assert (elsewhere.local / "metrics.jsonl").read_text() == "{}\n"
    assert elsewhere.newest().step == 2
    # What is there already is not uploaded again.
    elsewhere._put = None
    elsewhere.upload_files()


def test_a_torn_upload_is_no_checkpoint_and_the_next_save_removes_it(run, elsewhere):
    damage(run, "step-00000002/state.json")
    before = there(run)
    assert [path.name for path in elsewhere.checkpoints()] == ["step-00000001"]
    assert elsewhere.newest().step == 1
    elsewhere.fetch()
    assert steps(elsewhere) == [1]
    # It may be the upload of a live run, beside which this start is refused.
    assert there(run) == before
    # On the machine that saved it, too: what is there counts.
    run.fetch()
    assert steps(run) == [1]
    save(run, 3)
    assert not any("step-00000002" in name for name in there(run))


def test_an_upload_that_loses_parts_does_not_count(run):
    put = run._put

    def losing(path: Path, name: str) -> None:
        if not name.endswith("parameters.safetensors"):
            put(path, name)

    run._put = losing
    with pytest.raises(RemoteError, match=r"step-00000003 has lost parameters"):
        save(run, 3)
    assert run.newest().step == 2


@pytest.mark.parametrize("name", ["../../profile", "/profile", "pictures/../../profile"])
def test_names_that_leave_the_run_are_refused(run, elsewhere, name, monkeypatch):
    monkeypatch.setattr(type(run._fs), "find", lambda self, root: [f"{root}config.yaml", f"{root}{name}"])
    with pytest.raises(RemoteError, match="profile', which no run writes"):
        elsewhere.fetch()
    assert list(elsewhere.local.iterdir()) == []


def test_a_rollback_fetches_an_earlier_checkpoint(run, elsewhere):
    elsewhere.fetch()
    folder = RunFolder(elsewhere.local, elsewhere)
    silent = {"say": print, "samples_of": lambda step: []}
    quarantine = Quarantine(folder.quarantine, Ranks(), share=0, samples=9, data_path="", start_step=2)
    recovery = Recovery(
        GuardSection(), None, identity={}, folder=folder, quarantine=quarantine, ranks=Ranks(), **silent
    )
    assert recovery.go_back(BadStep(2, "")).step == 1
    assert steps(elsewhere) == [1]
    elsewhere._names = lambda: 1 / 0
    with pytest.raises(RemoteUnavailable, match=r": division by zero"):
        recovery.go_back(BadStep(1, "is bad"))
    elsewhere._names = lambda: Path("/none").stat()
    with pytest.raises(TrainingFailed, match=r"step 1 .*: no such file"):
        recovery.go_back(BadStep(1, "is bad"))


def test_a_file_on_a_disk_is_whole_or_not_there(run, tmp_path):
    disk = RemoteRun(f"file://{tmp_path}/disk")
    for name in ("config.yaml", "metrics.jsonl"):
        disk._put(run.local / name, name)
    (run.local / "metrics.jsonl").write_text("{}\n{}\n")
    put = disk._fs.put_file
    seen = []

    def noting(source: str, target: str) -> None:
        put(source, target)
        seen.append((disk._names(), (tmp_path / "disk/metrics.jsonl").read_text()))
        raise OSError("killed")

    disk._fs.put_file = noting
    try:
        with pytest.raises(OSError, match="killed"):
            disk._put(run.local / "metrics.jsonl", "metrics.jsonl")
    finally:
        del disk._fs.put_file
    assert seen == [([".metrics.jsonl.tmp", "config.yaml", "metrics.jsonl"], "{}\n")]
    # What it leaves is no file of the run.
    disk.local.mkdir(parents=True)
    disk.fetch()
    assert {path.name for path in disk.local.iterdir()} == {"config.yaml", "metrics.jsonl"}


def test_the_folder_of_a_run_without_a_url_may_get_one(run, tmp_path):
    folder = tmp_path / "run"
    save_checkpoint(folder / "checkpoints", step=1, state=state(1), identity={})
    (folder / "checkpoints/.step-00000002.tmp").mkdir()
    (folder / "checkpoints/.step-00000002.tmp/parameters.safetensors").touch()
    (folder / "config.yaml").touch()
    disk = RemoteRun(f"file://{folder}")
    disk.local.mkdir(parents=True)
    disk.fetch()
    assert steps(disk) == [1]
    save(disk, 3)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"step-00000001", "step-00000003"}


@pytest.mark.parametrize("file", ["state.json", "parameters.safetensors"])
def test_one_that_the_store_cut_short_is_passed_over(run, elsewhere, file):
    damage(run, f"step-00000002/{file}", b"{")
    assert elsewhere.newest().step == (1 if file == "state.json" else 2)
    elsewhere.fetch()
    assert {path.name for path in list_checkpoints(elsewhere.local / "checkpoints")} > {"step-00000001"}
    assert load_checkpoint(elsewhere.local / "checkpoints/step-00000001").step == 1


def test_a_local_copy_that_is_damaged_is_fetched_again(run):
    (run.local / "checkpoints/step-00000002/parameters.safetensors").write_bytes(b"")
    run.fetch()
    assert 2 in steps(run)


def test_a_step_reached_again_is_replaced_and_state_comes_last(run):
    put, names = run._put, []

    def noting(path: Path, name: str) -> None:
        names.append((name.rpartition("/")[2], [path.name for path in run.checkpoints()]))
        put(path, name)

    run._put = noting
    run.upload_checkpoint(save_checkpoint(run.local / "checkpoints", step=2, state=state(9), identity={}))
    assert names[-1][0] == "state.json"
    # Nothing of it counts meanwhile.
    assert all(whole == ["step-00000001"] for _, whole in names)
    assert run.newest().step == 2


def test_removed_files_are_removed_there(run):
    (run.local / "metrics.jsonl").unlink()
    (run.local / ".summary.json.17.tmp").touch()
    (run.local / ".lock").touch()
    run.upload_files()
    assert {name for name in there(run) if "/" not in name} == {"config.yaml"}
    run.remove("step-00000001")
    assert [path.name for path in run.checkpoints()] == ["step-00000002"]
    assert not any("step-00000001" in name for name in there(run))


def test_another_node_gets_the_checkpoint_of_rank_0(run, elsewhere, tmp_path):
    # Rank 0's home may have another path.
    home = Path("/of/rank/0", run.local.name, "checkpoints")
    brought = elsewhere.bring(home / "step-00000002")
    assert load_checkpoint(brought).step == 2
    assert load_checkpoint(elsewhere.bring(home / "step-00000001")).step == 1
    # A node keeps one.
    assert not brought.exists()
    assert run.bring(run.local / "checkpoints" / "step-00000002").parent == run.local / "checkpoints"
    # One that `--resume PATH` names is no copy.
    assert run.bring(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["data/train-000000.tar", "earlier-run/config.yaml", "a.txt"])
def test_a_folder_with_other_files_is_no_run_folder(run, elsewhere, name):
    elsewhere._fs.rm(elsewhere._path(""), recursive=True)
    elsewhere._fs.pipe_file(elsewhere._path(name), b"large")
    elsewhere._get = None
    said = f"^run.dir={elsewhere.shown} has other files; give a folder of its own$"
    for ask in (elsewhere.fetch, elsewhere.read_facts, elsewhere.newest):
        with pytest.raises(RemoteError, match=said):
            ask()


def test_an_empty_object_that_stands_for_a_folder_is_no_file(elsewhere):
    root = elsewhere._path("")
    elsewhere._fs.find = lambda path: [root]
    try:
        assert elsewhere._names() == []
    finally:
        del elsewhere._fs.find


def test_config_and_summary_are_read_without_a_copy(run, elsewhere):
    (run.local / "config.yaml").write_text("run: {name: a}\n")
    (run.local / "summary.json").write_text('{"status": "done"}')
    run.upload_files()
    folder = RunFolder(elsewhere.local, elsewhere)
    (elsewhere.local / "summary.json").write_text('{"status": "failed"}')
    folder.foresee()
    assert (folder.read_status(), folder.read("config.yaml")) == ("done", "run: {name: a}\n")
    assert [path.name for path in elsewhere.local.iterdir()] == ["summary.json"]


def test_rank_0_needs_no_store_for_its_own_checkpoint(run, monkeypatch):
    path = run.local / "checkpoints/step-00000002"
    run._names = run._state = lambda *_: 1 / 0
    assert torch.equal(load_together(path, Ranks(), run.bring).parameters["weight"], torch.full((5,), 2.0))
    monkeypatch.setattr(checkpoint, "LATE_S", 0)
    monkeypatch.setattr(checkpoint, "gather_objects", lambda problem, ranks: [problem])
    with pytest.raises(RemoteUnavailable, match=r"rank 1 .*rank 0 .*\(memory://"):
        load_together(path, Ranks(rank=1, world_size=2), run.bring)
    # Without a URL.
    (path / "state.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"share the folder"):
        load_together(path, Ranks(rank=1, world_size=2), lambda path: path)


def test_credentials_that_are_missing_are_not_asked_for_again(tmp_path, monkeypatch, request):
    forget = pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache  # other tests have credentials
    forget()
    request.addfinalizer(forget)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RemoteError, match="credentials") as raised:
        RemoteRun("s3://bucket-of-nobody/run").newest()
    assert not isinstance(raised.value, RemoteUnavailable)


def test_errors_name_the_url_without_its_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocked = tmp_path / "file"
    blocked.touch()
    run = RemoteRun(f"file://{blocked}/run")
    run.local.mkdir(parents=True)
    (run.local / "metrics.jsonl").touch()
    with pytest.raises(RemoteError, match=rf"^file://{blocked}/run .*: not a directory$"):
        run.upload_files()
    assert RemoteRun("sftp://me:secret@host/run").shown == "sftp://me@host/run"
