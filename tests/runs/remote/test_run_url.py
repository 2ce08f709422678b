"""A run folder behind a URL: kills, machines that are new at each start, torn uploads, stores that refuse."""

import json
import os
import random
import signal
import subprocess
import sys
from uuid import uuid4

import fsspec
import pytest
from helpers.commands import ROOT, SMALL_MAE, run

from mae_vit.comparison.command import main as compare
from mae_vit.config.load import dump_config, load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import WRITABLE_SCHEMES, check_url
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.command import main as pretrain
from mae_vit.runtime.ranks import free_port
from mae_vit.training.checkpoints.checkpoint import verify_checkpoint
from mae_vit.training.outputs.environment import describe_environment

STEPS = 24
# Dies in the midst of upload number DIES_AT, is stopped in that of STOPS_AT, or fails in those of FAILS_AT and of the
# file FAILS_FOR; "interrupted" is the summary of a stopped run.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from mae_vit.pretraining.command import main
from mae_vit.training.checkpoints.remote import RemoteRun
put, count = RemoteRun._put, 0

def faulty(self, path, name):
    global count
    count += 1
    if count == int(os.environ.get("DIES_AT", 0)):
        torn = Path(os.environ["XDG_CACHE_HOME"]) / "torn"
        torn.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        put(self, torn, name)
        os.kill(os.getpid(), signal.SIGKILL)
    if count == int(os.environ.get("STOPS_AT", 0)):
        os.kill(os.getpid(), signal.SIGTERM)
    if name == "summary.json" and "interrupted" in path.read_text():
        name = "interrupted"
    if count in eval(os.environ.get("FAILS_AT", "()")) or name == os.environ.get("FAILS_FOR"):
        raise eval(os.environ.get("ERROR", "OSError"))("the store is full")
    put(self, path, name)

RemoteRun._put = faulty
# Other machines' disks are not visible.
same, own = RemoteRun._is_same, os.environ["XDG_CACHE_HOME"]
RemoteRun._is_same = lambda self, path: path.is_relative_to(own) and same(self, path)
sys.exit(main())
"""


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path, monkeypatch):
    """The URL of an empty folder, on this disk or in a bucket of a server of this machine's."""
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=free_port(), verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    # The servers of a process share their buckets, and fsspec keeps the address of the first.
    bucket = f"bucket-{uuid4().hex}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def options(digits):
    return [
        *("--config", "configs/pretrain/mae_digits.yaml", f"data.path={digits}", *SMALL_MAE),
        *("train.epochs=null", f"train.steps={STEPS}", "train.warmup_epochs=0", "monitor.log_every_steps=1"),
        *("monitor.evaluate_images=32", "checkpoint.every_steps=3", "checkpoint.keep_last=2"),
        *("checkpoint.keep_every=3", "train.precision=fp32", "data.augment.flip=true"),
    ]


@pytest.fixture
def undisturbed(options, tmp_path):
    """The encoder of the run that nothing disturbs, in a folder."""
    done = run("pretrain/run.py", *options, f"run.dir={tmp_path / 'straight'}")
    assert done.returncode == 0, done.stderr
    return (tmp_path / "straight/encoder.safetensors").read_bytes()


def on_new_machine(tmp_path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Starts a run on a machine with an empty cache."""
    cache = tmp_path / f"machine-{len([*tmp_path.glob('machine-*')])}"
    cache.mkdir()
    return run("-c", SCRIPT, *words, env=os.environ | {"XDG_CACHE_HOME": str(cache), **environment})


def read(url: str) -> bytes:
    with fsspec.open(url, "rb") as file:
        return file.read()


def check_whole(url: str, undisturbed: bytes) -> None:
    """All that the run leaves is there, and no more."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    assert read(f"{url}/encoder.safetensors") == undisturbed
    lines = read(f"{url}/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert json.loads(read(f"{url}/summary.json"))["status"] == "done"
    left = {path[len(root) :].split("/")[2] for path in system.find(root) if "/checkpoints/" in path}
    # The last two, and each third of the plan.
    assert left == {f"step-{step:08d}" for step in (9, 18, 21, 24)}


def check_checkpoints(url: str, into) -> list[int]:
    """Returns the steps of the checkpoints that count, all of which are intact."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    folders = [path.rpartition("/")[0] for path in system.find(root) if path.endswith("/state.json")]
    steps = []
    for number, folder in enumerate(sorted(folders)):
        path = into / f"{number}" / folder.rpartition("/")[2]
        system.get(f"{folder}/", f"{path}/", recursive=True)
        # The kill tore the marker itself on a disk, where it is not JSON then; a bucket has whole objects.
        if path.joinpath("state.json").read_bytes().endswith(b"}\n"):
            steps.append(verify_checkpoint(path).step)
    return steps


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_at_uploads_ends_bit_identical(store, options, undisturbed, tmp_path):
    url, chance, kills, before = f"{store}/run", random.Random(0), 6, 0
    for number in range(kills):
        # The first ones are of the config and the like; a save has six.
        died = on_new_machine(
            tmp_path, *options, f"run.dir={url}", DIES_AT=str(chance.randint(4, 30) if number else 2)
        )
        assert died.returncode == -signal.SIGKILL, died.stderr
        last = max(check_checkpoints(url, tmp_path / f"seen-{number}"), default=0)
        assert last >= before
        before = last
    assert before > 6
    done = on_new_machine(tmp_path, *options, f"run.dir={url}")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    check_whole(url, undisturbed)
    again = on_new_machine(tmp_path, *options, f"run.dir={url}")
    assert again.returncode == 0, again.stderr
    assert f"{url} is finished ({STEPS} steps)" in again.stdout
    plan = on_new_machine(tmp_path, *options, f"run.dir={url}", "--dry-run")
    assert f"{url}, is finished (step {STEPS})" in plan.stdout


def test_a_run_goes_on_elsewhere(store, options, undisturbed, tmp_path):
    url = f"{store}/run"
    died = on_new_machine(tmp_path, *options, f"run.dir={url}", DIES_AT="40")
    assert died.returncode == -signal.SIGKILL
    plan = on_new_machine(tmp_path, *options, f"run.dir={url}", "--dry-run")
    assert f" from {url}/checkpoints/step-000000" in plan.stdout
    other = on_new_machine(tmp_path, *options, f"run.dir={url}", "run.seed=5")
    assert other.returncode == 2
    assert f"error: {url}/checkpoints/step-000000" in other.stderr
    assert other.stderr.endswith("another run.dir\n")
    assert not [*tmp_path.glob("machine-1/**/checkpoints")]
    # A store that refuses for a while is warned of.
    done = on_new_machine(tmp_path, *options, f"run.dir={url}", FAILS_AT="(8,)")
    assert done.returncode == 0, done.stderr
    refused = (
        f"warning: the checkpoint of step 15: {url} cannot be written: the store is full; continuing with"
    )
    assert refused in done.stderr
    check_whole(url, undisturbed)
    never = on_new_machine(tmp_path, *options, f"run.dir={url}", "--resume", "never")
    assert never.returncode == 2
    assert f"error: --resume never: {url} " in never.stderr


@pytest.mark.parametrize(("error", "code"), [("OSError", 75), ("PermissionError", 1)])
def test_a_store_that_refuses_the_results_is_named_alone(options, tmp_path, error, code):
    url = f"file://{tmp_path}/store/run"
    done = on_new_machine(tmp_path, *options, f"run.dir={url}", FAILS_FOR="encoder.safetensors", ERROR=error)
    assert done.returncode == code, done.stderr
    refused = (
        f"error: {url} cannot be written: the store is full; the last state is saved, and the same command"
    )
    assert refused in done.stderr
    assert "Make room" not in done.stderr


def test_a_store_that_refuses_for_a_while_lets_slurm_requeue(options, tmp_path):
    url = f"file://{tmp_path}/store/run"
    refused = f"{url} cannot be written: the store is full\n"
    first = on_new_machine(tmp_path, *options, f"run.dir={url}", FAILS_AT="(1,)")
    assert first.returncode == 75, first.stderr
    assert first.stderr.endswith(f"error: {refused}")
    stopped = on_new_machine(tmp_path, *options, f"run.dir={url}", STOPS_AT="20", FAILS_FOR="interrupted")
    assert stopped.returncode == 75, stopped.stderr
    assert f"warning: {refused}" in stopped.stderr
    assert "after saving; the same command resumes" in stopped.stdout


@pytest.mark.slow
def test_a_store_that_refuses_for_good_ends_the_run(options, tmp_path):
    url = f"file://{tmp_path}/store/run"
    words = (*options, f"run.dir={url}", "checkpoint.max_failed_saves=3")
    done = on_new_machine(tmp_path, *words, FAILS_AT="range(12, 1000)")
    assert done.returncode == 1
    assert "3 saves in a row" in done.stderr
    assert "Traceback" not in done.stderr
    assert check_checkpoints(url, tmp_path / "seen") != []


@pytest.mark.slow
@pytest.mark.distributed
def test_nodes_that_share_no_disk(options, undisturbed, tmp_path):
    """Two ranks, each with a cache of its own: a rank whose node lacks the checkpoint downloads it."""
    url = f"file://{tmp_path}/store/run"

    def start(attempt: int, **environment: str) -> list[subprocess.Popen]:
        together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        together |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        started = []
        for rank in range(2):
            cache = tmp_path / f"node-{rank}-{attempt}"
            cache.mkdir()
            own = {"RANK": str(rank), "XDG_CACHE_HOME": str(cache)} | (environment if rank == 0 else {})
            with (tmp_path / f"rank-{rank}-{attempt}.log").open("w") as log:
                command = [sys.executable, "-c", SCRIPT, *options, f"run.dir={url}"]
                environ = os.environ | together | own
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
                )
        return started

    assert [process.wait(300) for process in start(0, DIES_AT="40")] == [-signal.SIGKILL, 75]
    assert not [*tmp_path.glob("node-1-0/**/checkpoints")]
    codes = [process.wait(300) for process in start(1)]
    assert codes == [0, 0], (tmp_path / "rank-0-1.log").read_text() + (tmp_path / "rank-1-1.log").read_text()
    assert [*tmp_path.glob("node-1-1/**/state.json")]
    assert "resuming from" in (tmp_path / "rank-0-1.log").read_text()
    lines = read(f"{url}/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("http://host/run", 2, 'run.dir=http://host/run: unknown scheme "http"; did you mean "sftp"?'),
        ("s3:///run", 2, "has no host; give s3://HOST/FOLDER"),
        ("s3://bucket/run", 75, "s3://bucket/run cannot be "),
    ],
)
def test_bad_urls_are_one_line(options, url, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Nobody listens there.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.chdir(ROOT)
    assert pretrain([*options, f"run.dir={url}"]) == code
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert message in line


@pytest.mark.parametrize("key", ["run.dir", "pretrain.MAE.dir"])
def test_a_comparison_needs_a_disk(key, capsys):
    config = str(ROOT / "configs/compare/compare_demo.yaml")
    assert compare(["--config", config, f"{key}=s3://me:secret@bucket/a"]) == 2
    assert f"error: {key}=s3://bucket/a: a comparison " in capsys.readouterr().err


def test_what_is_uploaded_has_no_credentials():
    word = "run.dir=sftp://me:secret@host/run"
    config = dump_config(load_config(PretrainConfig, find_config("mae_digits"), [word]))
    assert "  dir: sftp://me@host/run\n" in config
    assert describe_environment(["pretrain", word], 1)["command"] == [
        "pretrain",
        "run.dir=sftp://me@host/run",
    ]


def test_a_run_folder_may_be_named_as_shards_are():
    check_url("s3://bucket/lr{1}", key="run.dir", schemes=WRITABLE_SCHEMES)
    with pytest.raises(InputError, match="points to shards"):
        check_url("s3://bucket/lr{1}")
