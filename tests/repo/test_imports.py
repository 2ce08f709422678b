"""Who may import whom."""

import ast
from pathlib import Path

import pytest
from helpers.commands import ROOT

# Each imports only from those before it; what stands in one line imports nothing of each other.
ORDERS = {
    "mae_vit": (
        *(
            "core",
            "pages runtime",
            "models",
            "config",
            "objectives",
            "data",
            "evaluation",
            "training",
            "weights",
        ),
        *("inspection", "pretraining finetuning", "cli"),
    ),
    "mae_vit/data": (
        *(
            "images order",
            "shards",
            "normalization remote prepare",
            "data_path index",
            "batches channels splits views",
            "training_data",
        ),
    ),
    "mae_vit/data/prepare": (
        *("bands folder_names", "listing", "label_lists", "convert shard_writer", "convert_pool entries"),
        *("masks selection statistics", "near_duplicates publish sources", "prepare", "in_place"),
    ),
    "mae_vit/training": (
        *(
            "copying optim",
            "engines",
            "outputs step_report",
            "checkpoints evals",
            "recovery run_setup startup",
        ),
        *("trainer", "run"),
    ),
    "mae_vit/weights": (
        *(
            "names seen_labels",
            "start",
            "other_bands",
            "load_report",
            "containers facts_beside feature_encoder load mae_decoder unwrap",
            "read",
            "foreign",
            "foreign_encoder",
            "encoder",
        ),
        "embed export",
    ),
    "mae_vit/pretraining": (
        *("probe_split", "data", "setup", "plan_text replay report", "doctor", "job", "command"),
    ),
    "mae_vit/finetuning": (
        *("config", "comparison data", "models", "label_overlap plan_text results", "frozen segmentation"),
        *("setup", "job", "command"),
    ),
    "mae_vit/finetuning/comparison": (
        *("config", "inputs", "settings", "spec", "plan", "checks progress_bar protocol", "report runner"),
        *("dry_run", "main", "command"),
    ),
}
# The root offers `mae_vit.load_encoder`, which it imports late; config describes geometry, not networks.
EXCEPT = {"mae_vit/__init__.py"}
ONLY_IN = {
    "deepspeed": {"mae_vit/training/engines/deepspeed_engine.py"},
    "huggingface_hub": {"mae_vit/core/hub.py"},
    "mlflow": {"mae_vit/training/outputs/trackers/mlflow_run.py"},
    "pyarrow": {"mae_vit/data/prepare/sources/parquet_columns.py", "mae_vit/weights/embed/output.py"},
    "torch.utils.tensorboard": {"mae_vit/training/outputs/trackers/tensorboard.py"},
    "wandb": {"mae_vit/training/outputs/trackers/wandb_run.py"},
    "webdataset": {"mae_vit/data/prepare/shard_writer.py"},
}
FILES = sorted(ROOT.glob("mae_vit/**/*.py"))


def test_each_place_in_an_order_is_there():
    for folder, order in ORDERS.items():
        for name in " ".join(order).split():
            assert (ROOT / folder / name).is_dir() or (ROOT / folder / f"{name}.py").is_file(), (
                f"{folder}: {name}"
            )


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return names


def place_in(order: tuple[str, ...], part: str) -> int:
    places = [place for place, line in enumerate(order) if part in line.split()]
    assert places, f"{part} has no place in {order}"
    return places[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path):
    file = path.relative_to(ROOT)
    imported = imports_of(path)
    for package, places in ONLY_IN.items():
        if any(module == package or module.startswith(package + ".") for module in imported):
            assert file.as_posix() in places, f"{package} is imported in {file}"
    assert not any(module.split(".")[0] in ("pretrain", "finetune", "benchmarks") for module in imported)
    for folder, order in ORDERS.items():
        prefix = Path(folder).parts
        if file.parts[: len(prefix)] != prefix or file.name == "__init__.py" or file.as_posix() in EXCEPT:
            continue
        me = file.parts[len(prefix)].removesuffix(".py")
        for module in imported:
            parts = tuple(module.split("."))
            if parts[: len(prefix)] != prefix or len(parts) == len(prefix) or parts[len(prefix)] == me:
                continue
            assert place_in(order, parts[len(prefix)]) < place_in(order, me), f"{file} imports {module}"


def test_no_circles():
    """A file that imports itself by way of others loads in one order of imports alone."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }

    def needs(path: Path) -> set[str]:
        imported = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{name.name}" for name in node.names}
                imported |= {name if name in modules else name.rpartition(".")[0] for name in names}
        return imported & modules.keys()

    left = {module: needs(path) - {module} for module, path in modules.items()}
    while ready := {module for module, needed in left.items() if not needed & left.keys()}:
        for module in ready:
            del left[module]
    assert not left


def test_the_root_holds_folders_alone():
    loose = {path.name for path in (ROOT / "mae_vit").iterdir() if path.is_file()}
    assert loose == {"__init__.py"}


def test_entry_scripts_hold_no_logic():
    for script in ("pretrain/run.py", "finetune/run.py", "finetune/compare.py"):
        assert len((ROOT / script).read_text().splitlines()) <= 25


def test_the_whole_tree_is_covered():
    assert len(FILES) > 200
