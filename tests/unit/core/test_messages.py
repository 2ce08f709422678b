"""How messages and reports write numbers."""

import pytest

from mae_vit.core.messages import format_decimal


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        # These floats are below the half.
        (100 * 0.5495, "", "55.0"),
        (-100 * 0.6435, "+", "-64.4"),
        (1.25, "+", "+1.3"),
        (-0.04, "", "-0.0"),
    ],
)
def test_a_half_is_rounded_up(value, sign, text):
    assert format_decimal(value, sign) == text
