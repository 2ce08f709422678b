"""checkpoint.every_minutes: saves between those of the plan, by a clock that the tests set."""

from types import SimpleNamespace

import pytest
from helpers.commands import one_line, saved_steps

from mae_vit.config.schema import CheckpointSection
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint
from mae_vit.training.checkpoints.saver import Saver

LENGTH = [
    *("train.steps=12", "monitor.evaluate_every_steps=100"),
    *("checkpoint.keep_last=99", "guard.skip_steps=2"),
    *("monitor.evaluate_images=16", "monitor.probe_queries=0"),
]
NEVER = 10**6


@pytest.fixture
def a_minute_a_step(monkeypatch):
    """Rank 0's clock goes on by a minute whenever a step asks whether a save is due, and not in between."""
    due, save, minutes = Saver.due, Saver.save, [0]

    def later(self) -> bool:
        minutes[0] += 1
        return due(self)

    monkeypatch.setattr(Saver, "due", later)
    # Written before training goes on, so that nothing depends on the disk.
    monkeypatch.setattr(Saver, "save", lambda *given, wait: save(*given, wait=True))
    monkeypatch.setitem(Saver.__init__.__kwdefaults__, "clock", lambda: 60.0 * minutes[0])


# Flags are read with the next step, or at once where a line is logged.
@pytest.mark.parametrize(("log_every", "expected"), [(1, [0, 4, 8, 12]), (100, [0, 5, 10, 12])])
def test_saves_by_time_change_nothing_else(
    call, tmp_path, a_minute_a_step, checkpoint, encoder, log_every, expected
):
    often = f"monitor.log_every_steps={log_every}"
    assert call(*LENGTH, often, f"checkpoint.every_steps={NEVER}", name="without") == 0
    by_time = ["checkpoint.every_steps=null", "checkpoint.every_minutes=4"]
    assert call(*LENGTH, often, *by_time, name="with") == 0
    assert saved_steps(tmp_path / "without") == [0, 12]
    assert saved_steps(tmp_path / "with") == expected
    # As after a kill, it resumes from the second of them.
    middle = checkpoint("with", expected[2])
    assert call(*LENGTH, often, *by_time, "--resume", str(middle), name="rest") == 0
    assert saved_steps(tmp_path / "rest") == [expected[2], 12]
    assert encoder("with") == encoder("rest") == encoder("without")


def test_steps_and_minutes_save_whichever_comes_first_and_steps_alone_are_kept(
    call, tmp_path, a_minute_a_step
):
    both = ["checkpoint.every_steps=5", "checkpoint.every_minutes=3", "monitor.log_every_steps=1"]
    assert call(*LENGTH, *both) == 0
    # Each save, of whatever kind, begins the minutes anew.
    assert saved_steps(tmp_path / "run") == [0, 3, 5, 8, 10, 12]
    kept = ["checkpoint.keep_last=1", "checkpoint.keep_every=1"]
    assert call(*LENGTH, *both, *kept, name="few") == 0
    assert saved_steps(tmp_path / "few") == [5, 10, 12]


def test_a_bad_step_is_never_saved_however_often_it_is_due(call, tmp_path, a_minute_a_step, poison):
    seen = poison(float("nan"), lambda _: len(seen) == 7)
    every = ["checkpoint.every_steps=null", "checkpoint.every_minutes=1"]
    assert call(*LENGTH, *every, "monitor.log_every_steps=100") == 0
    paths = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert all(load_checkpoint(path).state.is_finite() for path in paths)
    assert saved_steps(tmp_path / "run")[-1] == 12
    incidents = list((tmp_path / "run" / "incidents").glob("*.json"))
    assert [path.name for path in incidents] == ["step-00000007-1.json"]
    # The first step is read at once, each other with the next: saved with steps 1, 3 and 5, asked for with 1, 2 and 4.
    # It was asked for again with step 6, and the bad step was read before it was saved.
    assert '"back_to_step": 5' in incidents[0].read_text()


def test_a_write_under_way_puts_the_next_save_off(tmp_path):
    now, engine = [0.0], SimpleNamespace(ranks=Ranks())
    writing = SimpleNamespace(is_alive=lambda: True, join=lambda: None)
    options = {"identity": {}, "every_steps": NEVER, "say": print, "clock": lambda: now[0]}
    saver = Saver(engine, tmp_path, CheckpointSection(every_minutes=2), **options)
    saver._thread = writing
    for now[0], alive, due in ((119.0, True, False), (120.0, True, False), (120.0, False, True)):
        writing.is_alive = lambda alive=alive: alive
        assert saver.due() == due
    saver.restart_clock()
    assert not saver.due()


def test_keeping_every_so_many_needs_saves_to_count(call, capsys):
    every = [
        *("train.steps=30", "checkpoint.every_steps=null"),
        *("checkpoint.every_minutes=20", "checkpoint.keep_every=2"),
    ]
    assert call("--dry-run", *every) == 2
    assert "keep_every=2 " in one_line(capsys)
    assert call("--dry-run", *every, "checkpoint.every_epochs=1") == 0
    assert "20 min, every 11 steps" in capsys.readouterr().out
    assert call("--dry-run", "checkpoint.every_minutes=20min") == 2
    assert "checkpoint.every_minutes='20min'" in one_line(capsys)
