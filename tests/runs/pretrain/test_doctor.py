"""`mae-vit doctor`: each check passes, warns or fails, and says what to do."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.commands import ROOT, SMALL_MAE
from helpers.damage import copy_of, damage

from mae_vit.cli import main as cli
from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining import doctor as examining
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.runtime.device import room_in
from mae_vit.runtime.ranks import Ranks

CONFIG = ["doctor", "--config", "configs/pretrain/mae_digits.yaml"]


@pytest.fixture
def doctor(digits, tmp_path, capsys, monkeypatch):
    """Runs the doctor: doctor("key=value", ...) -> (exit code, {check: [(status, text)]}, output)."""
    monkeypatch.chdir(ROOT)

    def call(*words):
        capsys.readouterr()
        code = cli.main([*CONFIG, f"data.path={digits}", f"run.dir={tmp_path / 'run'}", *SMALL_MAE, *words])
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
    devices = []
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(
        examining,
        "join_ranks",
        lambda _, device: devices.append(device.type) or examining.Check("FAIL", "ranks", ""),
    )
    assert doctor(f"run.device={asked}")[0] == 1
    assert devices == ["cuda" if asked == "auto" else "cpu"]


def test_all_is_well(doctor, tmp_path):
    code, checks, output = doctor()
    assert code == 0, output
    assert {"torch", "device", "memory", "disk", "loading", "samples", "ranks"} <= set(checks)
    assert {status for results in checks.values() for status, _ in results} == {"ok"}
    assert "all checks passed" in output
    # The plan too, as --dry-run prints it.
    assert re.search(r"^parameters .* encoder", output, re.MULTILINE)
    assert not (tmp_path / "run").exists()


def test_without_a_config_it_checks_what_all_runs_need(capsys):
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert {"torch", "device", "precision", "ranks", "versions"} <= set(read(output))
    assert "--config FILE" in output
    assert cli.main(["doctor", "train.steps=3"]) == 2
    assert "--config FILE" in capsys.readouterr().err


def test_deepspeed_that_does_not_import_fails(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "mae_vit.training.engines.deepspeed_engine", None)
    code, checks, _ = doctor("train.engine=deepspeed")
    assert code == 1
    ((status, text),) = checks["deepspeed"]
    assert (status, "train.engine=torch" in text) == ("FAIL", True)


def test_a_driver_without_a_device_fails(monkeypatch):
    monkeypatch.setattr(examining.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not torch.cuda.is_available():
        assert examining.check_software(None, Ranks())[0].status == "FAIL"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert examining.check_software(None, Ranks())[0].status == "ok"


@pytest.mark.parametrize(
    ("words", "name", "status", "said"),
    [
        (["data.order=blocks"], "shards", "warn", "data.block_shards=1"),
        (["train.precision=fp16"], "precision", "warn", "train.precision=auto"),
        (["data.workers=64"], "cores", "warn", "data.workers=auto"),
    ],
)
def test_findings(doctor, words, name, status, said):
    code, checks, output = doctor(*words)
    assert (status, True) in [(s, said in text) for s, text in checks[name]], output
    assert code == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.epochz=3", "train.epochs"),
        ("data.split=trian", 'no split "trian"'),
        ("train.batch_size_per_device=50", "nearest: 32"),
    ],
)
def test_a_run_that_cannot_be_set_up_is_bad_input(doctor, word, said):
    code, checks, output = doctor(word)
    assert code == 2
    assert not checks
    assert re.fullmatch(rf"error: .*{said}.*\n", output)


def arguments_of(digits, tmp_path):
    config = ["--config", "configs/pretrain/mae_digits.yaml", f"data.path={digits}"]
    return [*config, f"run.dir={tmp_path / 'run'}", *SMALL_MAE]


def test_a_dry_run_is_the_doctor(doctor, digits, tmp_path, capsys):
    _, _, output = doctor()
    assert pretrain_main([*arguments_of(digits, tmp_path), "--dry-run"]) == 0

    def steady(text: str) -> list[str]:
        return [re.sub(r"[\d.,:]+", "#", line) for line in text.splitlines()]

    assert steady(capsys.readouterr().out) == steady(output)


def test_a_folder_of_an_earlier_run_is_a_warning(doctor, digits, tmp_path):
    """Doctor and dry run train nothing there: they say what the run itself will do."""
    short = ["train.steps=1", "train.warmup_steps=0", "monitor.tensorboard=false"]
    assert pretrain_main([*arguments_of(digits, tmp_path), *short]) == 0
    code, checks, output = doctor(*short)
    assert (code, "run" in checks) == (0, False)
    assert f"run         {tmp_path / 'run'}, is finished (step 1)" in output
    code, checks, output = doctor(*short, "train.steps=2")
    assert code == 0
    ((status, text),) = checks["run"]
    assert status == "warn"
    assert "train.steps was 1" in text
    assert "1 warning;" in output
    assert "length      2 steps" in output
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "--resume never" in doctor(*short)[1]["run"][0][1]


def test_memory_that_does_not_suffice(doctor, monkeypatch):
    monkeypatch.setattr(examining, "free_memory_gib", lambda ranks, device: (1e-4, "the machine"))
    code, checks, _ = doctor()
    assert code == 1
    assert checks["memory"][0][0] == "FAIL"
    assert "train.batch_size_per_device" in checks["memory"][0][1]


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


def test_a_disk_that_is_too_small(doctor, tmp_path):
    if os.geteuid():
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False
    ).returncode:
        pytest.skip("cannot mount here")
    try:
        code, checks, output = doctor(f"run.dir={place / 'run'}")
        assert code == 1, output
        assert checks["disk"][0][0] == "FAIL"
        assert "make room" in checks["disk"][0][1]
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("budget", "status"), [("0.001", "FAIL"), ("0.9", "warn")])
def test_damaged_samples(many_shards, tmp_path, doctor, budget, status):
    copy = copy_of(many_shards, tmp_path / "data")
    damage(many_shards, copy, dict.fromkeys(range(0, 1497, 3), "undecodable"))
    code, checks, output = doctor(f"data.path={copy}", "data.source=tar", f"data.damage_budget={budget}")
    assert checks["samples"][0][0] == status, output
    assert re.search(r"train-\d+\.tar, key \d+", checks["samples"][0][1])
    assert code == (1 if status == "FAIL" else 0)


def test_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    config = load_config(
        PretrainConfig, ROOT / "configs" / "pretrain" / "mae_digits.yaml", ["train.compile=true"]
    )
    (check,) = (check for check in examining.check_software(config, Ranks()) if check.name == "compiler")
    assert check.status == "FAIL"


def test_data_elsewhere_that_cannot_be_had(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("mae_vit.data.remote.folder.START_PATIENCE_S", 0.1)
    code, checks, output = doctor("data.path=http://127.0.0.1:9/data", f"data.cache_dir={tmp_path}")
    assert (code, checks) == (2, {}), output
    assert "fetched" in output


def torchrun(ranks, words, **options):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
        **options,
    )


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
    ended = torchrun(2, [str(script), *words])
    checks = read(ended.stdout)
    assert checks["ranks"][0][0] == "ok", ended.stdout + ended.stderr
    assert re.search(r"[\d.]+ GB/s on cpu", checks["network"][0][1])
    assert checks["versions"][0][0] == "FAIL"
    assert re.search(r"timm \S+ .*1\.0\.99 ", checks["versions"][0][1])
    assert ended.returncode != 0
    assert len(checks["versions"]) == 1, "all ranks print"


@pytest.mark.slow
def test_a_rank_that_does_not_come(digits, tmp_path):
    code = (
        "import sys; from mae_vit.pretraining.doctor import join_ranks; "
        "join_ranks.__kwdefaults__['timeout_s'] = 3.0; "
        "from mae_vit.cli.main import main; sys.exit(main())"
    )
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877", "OMP_NUM_THREADS": "1"}
    words = [*CONFIG, f"data.path={digits}", f"run.dir={tmp_path / 'run'}", "train.effective_batch_size=64"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
        env=os.environ | environment,
    )
    status, text = read(ended.stdout)["ranks"][0]
    assert status == "FAIL", ended.stdout + ended.stderr
    assert "127.0.0.1:29877" in text
    assert "missing rank 1" in text
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
