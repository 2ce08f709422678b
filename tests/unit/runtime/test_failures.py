"""Which errors mean that another rank is gone."""

from mae_vit.core.errors import FetchUnavailable
from mae_vit.runtime.failures import is_lost_rank


def test_an_unreachable_server_is_no_lost_rank():
    reason = "Connection reset by peer"
    assert is_lost_rank(RuntimeError(reason))
    assert not is_lost_rank(FetchUnavailable(f"http://host/shard.tar cannot be fetched: {reason}"))
