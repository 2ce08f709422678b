"""Every command in README and docs: run here, but with `--dry-run` where it would take a GPU or hours.

They run in a sandbox that has what they name: photographs, prepared data, runs. A command
that no rule below knows fails, so that new ones are tried too.
"""

import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import ROOT, SMALL_MAE
from helpers.images import prepare_colored_digits, prepare_pairs, write_pairs
from PIL import Image

from benchmarks.gpu.__main__ import parse as parse_gpu_parts
from mae_vit.cli.main import main as mae_vit
from mae_vit.comparison.command import main as compare
from mae_vit.finetuning.command import main as finetune
from mae_vit.pretraining.command import main as pretrain

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What the shell, or a person, does.
NOT_OURS = ("source", "tensorboard", "pip", "git", "cd", "wandb", "mlflow", "tail")
JOBS = {"pretrain": pretrain, "finetune": finetune, "compare": compare}
# These need a network or a second machine's file; tests/runs/test_plugins.py runs those of the mixer.
ELSEWHERE = (
    "prepare cifar10 ", "prepare cifar100 ", "https://", "s3://", "pipe:", "timm:", "mae_visualize", "mae_pretrain",
    "laion", "aws ", "--push", "hf:", "examples/mixer.py",
)  # fmt: skip


def commands_of(text: str) -> list[str]:
    """The commands of a page's shell blocks: joined over lines, without comments."""
    commands, inside = [], None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = None if inside is not None else line.removeprefix("```").strip()
        elif inside in ("", "console", "bash"):
            for part in re.sub(r"\s+#.*|^#.*", "", line).split("&&"):
                if part.strip():
                    commands.append(" ".join(part.split()))
    return commands


ALL = sorted({(page.name, command) for page in PAGES for command in commands_of(page.read_text())})


@pytest.fixture(scope="module")
def sandbox(colored, digits, tmp_path_factory):
    """A folder as the docs speak of it."""
    box = tmp_path_factory.mktemp("sandbox")
    rng = np.random.default_rng(0)
    for number in range(60):
        path = box / "photos" / ("cats", "dogs")[number % 2] / f"{number // 2}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    names = sorted(path.relative_to(box / "photos").as_posix() for path in box.glob("photos/*/*.jpg"))
    (box / "labels.csv").write_text("".join(f"{name},{name.partition('/')[0]}\n" for name in names))
    (box / "unlabeled").mkdir()
    for number in range(4):
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(
            box / f"unlabeled/{number}.jpg"
        )
    rows = [
        {"bytes": path.read_bytes(), "path": path.name} for path in sorted((box / "photos").rglob("*.jpg"))
    ]
    (box / "tables").mkdir()
    pq.write_table(pa.table({"image": rows}), box / "tables" / "train-00000.parquet")
    (box / "data").mkdir()
    (box / "data" / "cifar100").symlink_to(colored)
    # compare_cifar10_5k leaves three times 500 images of each class out: these have 1,130.
    seven = (0, 1, 2, [0, 1], [0, 2], [1, 2], [0, 1, 2])
    many = tmp_path_factory.mktemp("many")
    prepare_colored_digits(tmp_path_factory.mktemp("seven"), many, colors=seven)
    (box / "data" / "cifar10").symlink_to(many)
    # Users' images seldom have the sides of a config.
    others = prepare_colored_digits(
        tmp_path_factory.mktemp("others"), tmp_path_factory.mktemp("mine"), height=48, width=40
    )
    for name in ("mine", "photos", "imagenet"):
        (box / "data" / name).symlink_to(others)
    (box / "data" / "digits").symlink_to(digits)
    mix_folder(box / "photos", box / "tiles")
    for name in ("cells", "xrays"):
        (box / name).symlink_to(box / "tiles")
    tiles = box / "data" / "tiles"
    assert mae_vit(["prepare", str(box / "tiles"), str(tiles), "--holdout", "0.2"]) == 0
    for name in ("cells", "xrays"):
        (box / "data" / name).symlink_to(tiles)
    (box / "scans").mkdir()
    for number in range(3):
        np.save(box / "scans" / f"{number}.npy", np.full((1, 32, 32), 40 * number, np.int16))
    write_pairs(box / "pairs", count=160, side=40)
    pairs = tmp_path_factory.mktemp("pairs")
    prepare_pairs(box / "pairs", pairs)
    for name in ("pairs", "objects_on_photos"):
        (box / "data" / name).symlink_to(pairs)
    for part in ("configs", "docs", "examples", "slurm", "Makefile"):
        (box / part).symlink_to(ROOT / part)
    for split, form in (("train", "gztar"), ("test", "zip")):
        shutil.copytree(box / "photos", box / "packed" / split / split)
        shutil.make_archive(str(box / split), form, box / "packed" / split)
    length = ["train.steps=2", "train.warmup_steps=1", "train.epochs=null", "train.warmup_epochs=null"]
    small = [*SMALL_MAE, *length, "data.augment.crop=random_resized"]
    small += ["train.effective_batch_size=16", "monitor.tensorboard=false", f"data.path={others}"]
    run = box / "runs" / "mae_base"
    assert pretrain(["mae_cifar_tiny", *small, f"run.dir={run}"]) == 0
    for name in ("mae_cifar_tiny", "mae_digits", "photos", "photos_base", "mae_photos_64"):
        shutil.copytree(run, run.with_name(name))
    tuned = run.with_name("finetune_cifar_tiny-mae_cifar_tiny")
    few = ["train.steps=2", "train.warmup_steps=1", small[-3], "monitor.tensorboard=false"]
    words = ["finetune_cifar_tiny", "--ckpt", str(run), f"data.path={colored}", f"run.dir={tuned}"]
    assert finetune([*words, *few]) == 0
    for name in ("photos_finetuned", "finetune_photos_64-mae_photos_64"):
        shutil.copytree(tuned, run.with_name(name))
    for name in ("more_photos", "CIFAR-10-images"):
        (box / name).symlink_to(box / "photos")
    bands = [f"data.path={tiles}" if word.startswith("data.path") else word for word in small]
    assert pretrain(["mae_cifar_tiny", *bands, f"run.dir={run.with_name('mae_satellite')}"]) == 0
    return box


def mix_folder(photos, out):
    """Makes tiles of bands as docs/tools/mix_bands.py does."""
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    import mix_bands

    rng = np.random.default_rng(0)
    for path in sorted(photos.rglob("*.jpg")):
        photo = np.asarray(Image.open(path))[:32, :32].transpose(2, 0, 1)
        for number in range(4):
            stem = out / path.relative_to(photos).with_name(f"{path.stem}-{number}")
            stem.parent.mkdir(parents=True, exist_ok=True)
            mix_bands.write(stem, mix_bands.mix(photo, rng))


def dry(main, words):
    """Runs a job's command line without training."""
    assert main([*words, *([] if "--dry-run" in words else ["--dry-run"])]) == 0


def of_slurm(words):
    """What a script of slurm/ starts, with what follows it."""
    place = next(n for n, word in enumerate(words) if word.endswith(".sh"))
    script, rest = Path(words[place]), words[place + 1 :]
    assert script.is_file(), script
    if script.stem == "finetune":
        dry(finetune, rest)
    elif script.stem == "compare":
        dry(compare, ["--config", *rest])
    else:
        shutil.rmtree("runs")
        dry(pretrain, ["--config", *rest])


def of_python(words):
    """`python SCRIPT ...`, behind any launcher; `python -m benchmarks.gpu ...`, which takes a GPU."""
    if words[1] == "-m" and words[2] == "pip":
        return
    if "mae_vit.cli" in words:
        of_mae_vit(["mae-vit", *words[words.index("mae_vit.cli") + 1 :]])
        return
    if words[1:3] == ["-m", "benchmarks.gpu"]:
        if words[3] != "quarter-hour":
            parse_gpu_parts(words[3:])
        return
    place = next(n for n, word in enumerate(words) if word.endswith(".py"))
    script, rest = words[place], words[place + 1 :]
    mains = {"pretrain/run.py": pretrain, "finetune/run.py": finetune, "finetune/compare.py": compare}
    if script == "pretrain/run.py" and not any("=runs/" in word for word in rest):
        shutil.rmtree("runs")  # those that others begin from: this one is new
    if script in mains:
        dry(mains[script], rest)
    else:
        assert (ROOT / script).is_file(), script


def of_make(words):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(words[1:]) <= targets, words


def of_container(words):
    """`docker run ... IMAGE WORDS`: the words that `mae-vit` gets there."""
    if words[1] == "run":
        place = next(n for n, word in enumerate(words) if re.fullmatch(r"mae-vit(:cuda|\.sif)?", word))
        of_mae_vit(["mae-vit", *words[place + 1 :]])


def of_mae_vit(words):
    """Ours: as it stands, its outputs put where nothing is."""
    if words[1] in JOBS:
        if words[1] in ("pretrain", "compare") and not any("=runs/" in word for word in words):
            shutil.rmtree("runs")  # those that others begin from: these are new
        dry(JOBS[words[1]], words[2:])
    elif words[1] == "doctor":
        assert mae_vit(words[1:]) in (0, 1)  # of this machine
    else:
        assert mae_vit([*words[1:], *(["--images", "20"] if words[1] == "inspect" else [])]) == 0


@pytest.mark.docs
@pytest.mark.parametrize(("page", "command"), ALL, ids=lambda text: text[:70])
def test_it_runs(page, command, sandbox, tmp_path, monkeypatch):
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]  # of the environment
    if words[0] in NOT_OURS:
        return
    if any(part in command for part in ELSEWHERE):
        pytest.skip("needs a network, or a file of others")
    if "RUN" in words or "CONFIG" in words:
        named = {"RUN": "runs/mae_base", "CONFIG": "configs/pretrain/mae_cifar_tiny.yaml"}
        words = [named.get(word, word) for word in words]
    words = [re.sub("/shared/(imagenet|mine)", "data/mine", word) for word in words]
    box = tmp_path / "box"
    shutil.copytree(sandbox, box, symlinks=True)
    monkeypatch.chdir(box)
    monkeypatch.syspath_prepend(str(ROOT))
    # Data come from outside of the box, in another number than the papers' batches.
    if "mae-vit" in words and "prepare" in words:
        shutil.rmtree(box / "data")
        (box / "data").mkdir()
        if "data/mine" in words and "--exclude" in words:
            (box / "data" / "mine").symlink_to((sandbox / "data" / "mine").resolve())
        if "--in-place" in words and "--overwrite" in words:
            shutil.copytree(sandbox / "data" / "mine", box / "data" / "mine")
    rules = dict.fromkeys(("python", "deepspeed", "torchrun", "srun"), of_python)
    rules |= dict.fromkeys(("docker", "apptainer"), of_container)
    rules |= {"mae-vit": of_mae_vit, "make": of_make, "sbatch": of_slurm}
    assert words[0] in rules, f"{page}: no rule knows {words[0]!r}"
    rules[words[0]](words)


def test_there_are_commands_to_run():
    assert len(ALL) > 40
    assert {page for page, _ in ALL} >= {"README.md", "tutorial.md", "cluster.md"}


@pytest.mark.parametrize("name", ["config_reference", "command_reference"])
def test_a_reference_is_that_of_the_code(name):
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    tool = import_module(name)
    assert tool.OUT.read_text() == tool.render(), f"run python docs/tools/{name}.py"
