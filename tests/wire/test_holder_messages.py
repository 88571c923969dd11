"""What agent and holder send each other."""

import msgspec
import pytest

from holdfast.wire import holder_messages
from holdfast.wire.holder_messages import HolderRank, KillRank, RankKey


@pytest.mark.parametrize("key", [RankKey(1, 0), RankKey(12, 4095)])
def test_a_key_is_read_as_it_was_written(key: RankKey) -> None:
    assert RankKey.parse_text(str(key)) == key
    assert HolderRank(key=str(key), pid=1).rank_key == key


def test_a_holder_of_an_earlier_version_understands_a_key() -> None:
    """It may live on while its agents are replaced by newer ones."""
    sent = msgspec.msgpack.decode(holder_messages.encode(KillRank(key=str(RankKey(3, 12)), signal=9)))
    assert sent == {"type": "kill", "key": "3:12", "signal": 9}
