"""How messages and reports write numbers."""

import pytest

from mae_vit.core.messages import format_percent


@pytest.mark.parametrize(
    ("share", "text"),
    # The floats of 100 * 0.5495 and 100 * 0.6435 are below the half.
    [(0.5495, "55.0"), (0.6435, "64.4"), (0.54949, "54.9"), (0.5494, "54.9"), (0.0, "0.0"), (1.0, "100.0")],
)
def test_a_half_percent_is_rounded_up(share, text):
    assert format_percent(share) == text
