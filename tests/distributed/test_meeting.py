"""Ranks that wait for others say for whom, where and since when, and what to do if nobody will come."""

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from helpers.commands import ROOT
from torch.distributed import TCPStore

from mae_vit.core.errors import InputError
from mae_vit.runtime import process_group as meeting
from mae_vit.runtime.process_group import meet
from mae_vit.runtime.ranks import Ranks, find_ranks, free_port

REMEDY = "RANK and WORLD_SIZE are set; unset them to run one process"


@pytest.fixture
def address(monkeypatch):
    """Where another job met, which left its environment."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_meetings", 0)
    monkeypatch.setattr(meeting, "_FIRST_WORD_S", 0.0)
    monkeypatch.setattr(meeting, "_NEXT_WORD_S", 0.1)
    return f"127.0.0.1:{port}"


def meet_soon(rank: int, world_size: int = 2, *, timeout_s: float = 0.6):
    return meet(Ranks(rank, world_size), timeout=timedelta(seconds=timeout_s))


def test_rank_0_names_who_is_missing_and_gives_up(address, capsys):
    with pytest.raises(
        InputError, match=f"3 ranks at {address}, 1 of 3 here, missing ranks 1, 2; .*{REMEDY}"
    ):
        meet_soon(0, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    expected = rf"waiting for 3 ranks at {address}, 1 of 3 here, missing ranks 1, 2, since 0:00:0\d. {REMEDY}"
    assert all(re.fullmatch(expected, line) for line in lines)


def test_another_rank_says_where_nobody_answers(address, capsys, monkeypatch):
    with pytest.raises(InputError, match=rf"rank 0 at {address} \(connection refused\).*{REMEDY}"):
        meet_soon(1)
    assert f" rank 0 at {address} (" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "no-such-machine.invalid")
    with pytest.raises(InputError, match=r"rank 0 at no-such-machine\.invalid:\d+ \("):
        meet_soon(1)
    monkeypatch.setenv("MASTER_PORT", "29500x")
    with pytest.raises(InputError, match='MASTER_PORT="29500x"'):
        meet_soon(0)


def test_a_stranger_at_the_port(address):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        stranger.listen()
        # torch waits without end for its answer.
        with pytest.raises(InputError, match=f"rank 0 at {address}"):
            meet_soon(1, timeout_s=2.0)
        with pytest.raises(InputError, match="MASTER_PORT"):
            meet_soon(0, timeout_s=60.0)


_RANK_1 = """
from datetime import timedelta
from mae_vit.runtime.process_group import meet
from mae_vit.runtime.ranks import find_ranks
store = meet(find_ranks(), timeout=timedelta(seconds=100))
store.set("said", "by rank 1")
store.wait(["heard"])
"""


def meet_rank_1(**environment: str) -> None:
    """Meets another process, which is rank 1."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen([sys.executable, "-c", _RANK_1], env=os.environ | place | environment)
    try:
        store = meet_soon(0, timeout_s=100.0)
        assert store.get("said") == b"by rank 1"
        store.set("heard", "")
        assert other.wait(100) == 0
    finally:
        other.kill()


@pytest.mark.distributed
def test_a_rank_that_comes_later_ends_the_waiting(address, capsys):
    meet_rank_1()
    # It imports for longer than a tenth of a second.
    assert "1 of 2 here, missing rank 1" in capsys.readouterr().err


@pytest.mark.distributed
def test_ranks_meet_again_at_a_store_that_remembers_meetings_of_other_nodes(address, monkeypatch):
    """torchrun's: a node that stays has counted a restart, the one that returns has not."""
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    # One that asked and was killed.
    store.set("mae-vit/asked/1", "a question of an earlier round")
    for restarts in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setattr(meeting, "_meetings", 0)  # each is a new process
        meet_rank_1(TORCHELASTIC_RESTART_COUNT="0")


@pytest.mark.parametrize(
    "place",
    [
        *({"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0"} for rank in "20"),
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_half_of_a_place(place, monkeypatch, said):
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as error:
        find_ranks()
    said(error)
    # A world size without a rank is no launcher's.
    monkeypatch.delenv("RANK")
    assert find_ranks() == Ranks()
    assert os.environ["WORLD_SIZE"] == "1"
