"""`mae-vit doctor`: each check passes, warns or fails, and says what to do."""

import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from helpers.commands import ROOT, SMALL_MAE, run
from helpers.damage import copy_of, damage

from mae_vit.cli import main as cli
from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining import doctor as examining
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.pretraining.data import open_data
from mae_vit.runtime.device import room_in
from mae_vit.runtime.ranks import Ranks

CONFIG = ["doctor", "--config", "configs/pretrain/mae_digits.yaml"]


@pytest.fixture
def arguments(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    return [*CONFIG[1:], f"data.path={digits}", f"run.dir={tmp_path / 'run'}", *SMALL_MAE]


@pytest.fixture
def doctor(arguments, capsys):
    """Runs the doctor: doctor("key=value", ...) -> (exit code, {check: [(status, text)]}, output)."""

    def call(*words):
        capsys.readouterr()
        code = cli.main(["doctor", *arguments, *words])
        captured = capsys.readouterr()
        return code, read(captured.out), captured.out + captured.err

    return call


def read(output):
    checks = {}
    for status, name, text in re.findall(r"^(ok|warn|FAIL) +(\S+) +(.*)$", output, re.MULTILINE):
        checks.setdefault(name, []).append((status, text))
    return checks


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_ranks_meet_and_choose_a_precision_by_the_device_of_the_run(doctor, monkeypatch, asked):
    devices, refused = [], examining.Check("FAIL", "ranks", "")
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(examining, "join_ranks", lambda _, device: devices.append(device.type) or refused)
    assert doctor(f"run.device={asked}")[0] == 1
    assert devices == ["cuda" if asked == "auto" else "cpu"]


def test_all_is_well_and_a_dry_run_is_the_doctor(doctor, arguments, tmp_path, capsys):
    code, checks, output = doctor()
    assert code == 0, output
    assert {"torch", "device", "memory", "disk", "loading", "samples", "ranks"} <= set(checks)
    assert {status for results in checks.values() for status, _ in results} == {"ok"}
    assert "all checks passed" in output
    assert re.search(r"^parameters .* encoder", output, re.MULTILINE)
    assert pretrain_main([*arguments, "--dry-run"]) == 0

    def steady(text: str) -> list[str]:
        return [re.sub(r"[\d.,:]+", "#", line) for line in text.splitlines()]

    assert steady(capsys.readouterr().out) == steady(output)
    assert not (tmp_path / "run").exists()


def test_without_a_config_it_checks_what_all_runs_need(capsys):
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert {"torch", "device", "precision", "ranks", "versions"} <= set(read(output))
    assert "mae-vit doctor CONFIG" in output
    assert cli.main(["doctor", "train.steps=3"]) == 2
    assert "required: CONFIG" in capsys.readouterr().err


def test_software_that_is_missing_fails(doctor, monkeypatch):
    config = load_config(
        PretrainConfig, ROOT / "configs" / "pretrain" / "mae_digits.yaml", ["train.compile=true"]
    )
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "")
        patched.delenv("CXX", raising=False)
        (check,) = (c for c in examining.check_software(config, Ranks()) if c.name == "compiler")
        assert check.status == "FAIL"
    with monkeypatch.context() as patched:
        # A driver without a device.
        patched.setattr(examining.shutil, "which", lambda name: f"/usr/bin/{name}")
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if not torch.cuda.is_available():
            assert examining.check_software(None, Ranks())[0].status == "FAIL"
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        assert examining.check_software(None, Ranks())[0].status == "ok"
    monkeypatch.setitem(sys.modules, "mae_vit.training.engines.deepspeed_engine", None)
    code, checks, _ = doctor("train.engine=deepspeed")
    ((status, text),) = checks["deepspeed"]
    assert (code, status, "train.engine=torch" in text) == (1, "FAIL", True)


@pytest.mark.parametrize(("pinned", "status"), [(True, "FAIL"), (False, "warn")])
def test_a_ring_for_which_shared_memory_is_too_small(digits, pinned, status):
    config = load_config(PretrainConfig, ROOT / CONFIG[2], [f"data.path={digits}", "data.workers=1"])
    data = replace(open_data(config, Ranks(), torch.device("cpu")), pin_memory=pinned)
    shm = examining.check_loading(data, 1 << 60, Ranks())[-1]
    assert (shm.name, shm.status) == ("shm", status)


@pytest.mark.parametrize(
    ("words", "name", "said"),
    [
        (["data.order=blocks"], "shards", "data.block_shards=1"),
        (["train.precision=fp16"], "precision", "train.precision=auto"),
        (["data.workers=64"], "cores", "data.workers=auto"),
    ],
)
def test_warnings(doctor, words, name, said):
    code, checks, output = doctor(*words)
    assert ("warn", True) in [(s, said in text) for s, text in checks[name]], output
    assert code == 0


def test_a_run_that_cannot_be_set_up_is_bad_input(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    for words, said in (
        (["train.epochz=3"], "train.epochs"),
        (["data.path=http://127.0.0.1:9/data", f"data.cache_dir={tmp_path}"], "fetched"),
    ):
        code, checks, output = doctor(*words)
        assert (code, checks) == (2, {})
        assert re.fullmatch(rf"error: .*{said}.*\n", output)


def test_a_folder_of_an_earlier_run_is_a_warning(doctor, arguments, tmp_path, monkeypatch):
    """Doctor and dry run train nothing there: they say what the run itself will do."""
    short = ["train.steps=1", "train.warmup_steps=0", "monitor.tensorboard=false", "checkpoint.keep_last=1"]
    assert pretrain_main([*arguments, *short]) == 0
    code, checks, output = doctor(*short)
    assert (code, "run" in checks) == (0, False)
    assert f"run         {tmp_path / 'run'}, is finished (step 1)" in output
    # One of two checkpoints is there, and a run that begins anew moves it aside.
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints").rglob("*.*"))
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=int(1.7 * size))
        patch.setattr(examining.shutil, "disk_usage", lambda path: usage)
        assert doctor(*short)[1]["disk"][0][0] == "ok"
        assert pretrain_main([*arguments, *short, "--resume", "never", "--dry-run"]) == 1
    code, checks, output = doctor(*short, "train.steps=2")
    ((status, text),) = checks["run"]
    assert (code, status) == (0, "warn")
    assert "train.steps was 1" in text
    assert "1 warning;" in output
    assert "length      2 steps" in output
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "--resume never" in doctor(*short)[1]["run"][0][1]


def test_memory_and_disk_that_do_not_suffice(doctor, monkeypatch):
    monkeypatch.setattr(examining, "free_memory_gib", lambda ranks, device: (1e-5, "the machine"))
    usage = shutil.disk_usage("/")._replace(free=1 << 16)
    monkeypatch.setattr(examining.shutil, "disk_usage", lambda path: usage)
    code, checks, _ = doctor()
    assert code == 1
    for name, remedy in (("memory", "train.batch_size_per_device"), ("disk", "make room")):
        status, text = checks[name][0]
        assert (status, remedy in text) == ("FAIL", True)


@pytest.mark.parametrize(
    ("most", "used"),
    [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")],
)
def test_a_container_or_job_has_less_memory_than_its_machine(tmp_path, most, used):
    (tmp_path / most).write_text(f"{4 << 30}\n")
    (tmp_path / used).write_text(f"{3 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 30}\n")
    assert room_in(tmp_path) == 2 << 30
    (tmp_path / most).write_text("max\n")
    assert room_in(tmp_path) is None


@pytest.mark.parametrize(("budget", "status"), [("0.001", "FAIL"), ("0.9", "warn")])
def test_damaged_samples(many_shards, tmp_path, doctor, budget, status):
    copy = copy_of(many_shards, tmp_path / "data")
    damage(many_shards, copy, dict.fromkeys(range(0, 1497, 3), "undecodable"))
    code, checks, output = doctor(f"data.path={copy}", "data.source=tar", f"data.damage_budget={budget}")
    assert checks["samples"][0][0] == status, output
    assert re.search(r"train-\d+\.tar, key \d+", checks["samples"][0][1])
    assert code == (1 if status == "FAIL" else 0)


@pytest.mark.slow
def test_ranks_meet_and_versions_are_compared(digits, tmp_path):
    """The second rank has another timm."""
    other = tmp_path / "site" / "timm-1.0.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 1.0.99\n")
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"if os.environ['RANK'] == '1': sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from mae_vit.cli.main import main\nsys.exit(main())\n"
    )
    words = [*CONFIG, f"data.path={digits}", f"run.dir={tmp_path / 'run'}", "train.effective_batch_size=64"]
    met = run("-m", "torch.distributed.run", "--nproc-per-node=2", str(script), *words)
    checks = read(met.stdout)
    assert checks["ranks"][0][0] == "ok", met.stdout + met.stderr
    assert re.search(r"[\d.]+ GB/s on cpu", checks["network"][0][1])
    assert checks["versions"][0][0] == "FAIL"
    assert re.search(r"timm \S+ .*1\.0\.99 ", checks["versions"][0][1])
    assert met.returncode != 0
    assert len(checks["versions"]) == 1, "all ranks print"


@pytest.mark.slow
def test_a_rank_that_does_not_come(digits, tmp_path):
    code = (
        "import sys; from mae_vit.pretraining import doctor; doctor._JOIN_TIMEOUT_S = 3.0; "
        "from mae_vit.cli.main import main; sys.exit(main())"
    )
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877", "OMP_NUM_THREADS": "1"}
    words = [*CONFIG, f"data.path={digits}", f"run.dir={tmp_path / 'run'}", "train.effective_batch_size=64"]
    alone = run("-c", code, *words, env=os.environ | place)
    status, text = read(alone.stdout)["ranks"][0]
    assert status == "FAIL", alone.stdout + alone.stderr
    assert "127.0.0.1:29877" in text
    assert "missing rank 1" in text
    assert alone.returncode == 1
    assert "Traceback" not in alone.stderr
