"""Runs that fail end at once, with their workers, and say why in a line."""

import errno
from pathlib import Path

import pytest
from helpers.commands import run

from mae_vit.core.errors import Damage, DamagedSample
from mae_vit.runtime.failures import run_to_exit_code

# What ends after a step with workers alive, as a full disk would end it.
FAILING = """
import sys
from pathlib import Path

if __name__ == "__main__":
    from mae_vit.data.images.augment import Augment
    from mae_vit.data.index import open_index
    from mae_vit.data.batches.loader import load_batches, start_worker_server
    from mae_vit.data.order.order import GlobalOrder, RankSlice
    from mae_vit.data.batches.augmented import open_source

    start_worker_server()
    index = open_index(Path(sys.argv[1]), "train")
    source = open_source(index, "tar", channels=1, augment=Augment((8, 8)), memory_limit_gib=1)
    batches = load_batches(source, GlobalOrder(len(index), 8, 0), RankSlice(), start_step=0, stop_step=99, workers=2)
    next(batches)
    raise OSError("no space left on device")
"""


def test_workers_do_not_outlive_an_unforeseen_error(digits, tmp_path):
    """They are deaf to SIGTERM, by which Python would end them and then wait for ever."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    ended = run(str(script), str(digits), timeout=500)
    assert ended.returncode == 1
    assert "no space left" in ended.stderr


@pytest.mark.parametrize(("ranks", "said"), [("1", "error: "), ("2", "error: rank 1: ")])
def test_a_damaged_image_is_named_by_the_rank_that_reads_it(monkeypatch, capsys, ranks, said):
    """Each rank reads its own share of the test images; the others only lose it."""
    for name, value in (("WORLD_SIZE", ranks), ("RANK", "1"), ("LOCAL_RANK", str(int(ranks) - 1))):
        monkeypatch.setenv(name, value)

    def job() -> int:
        raise DamagedSample(
            [(0, Damage(7, "test-000000.tar", "cats/7", 512, "it is cut short"))], Path("data")
        )

    assert run_to_exit_code(job) == 1
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert "cats/7" in error


def test_what_may_not_be_read_is_one_line(capsys):
    """As root, which these tests may be, every file may be read."""

    def job() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "shared/run")

    assert run_to_exit_code(job) == 2
    assert capsys.readouterr().err == "error: shared/run: permission denied\n"
