"""A fixture for dry runs of large configs on a small machine."""

import pytest

from mae_vit.pretraining import doctor


@pytest.fixture(autouse=True)
def ample_machine(monkeypatch):
    """A dry run fails where memory or disk do not suffice, and the machine of the tests may be small."""
    monkeypatch.setattr(doctor, "free_memory_gib", lambda ranks, device: (1e4, "this machine"))
    monkeypatch.setattr(doctor, "check_disk", lambda *_: doctor.Check("ok", "disk", "not asked"))
