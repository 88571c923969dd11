"""What only who knows the job's secret can make, read or change."""

import msgspec
import pytest

from holdfast.journal.journal_key import TAG_BYTES, DecryptionError, JournalKey
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order

SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
KEY = JournalKey(SECRET, "run")
OTHERS = (JournalKey(SECRET[::-1], "run"), JournalKey(SECRET, "another run"))
PLACE = (3, b"chain", {"door": b"tag", "plan": b"gat"})
SET = Order(verb="update", who="me", release=Release(number=2, env={"WANDB_API_KEY": "v4lue", "EMPTY": ""}))


def test_a_proof_is_of_one_place_by_one_key() -> None:
    proof = KEY.make_proof(*PLACE)
    assert KEY.is_proof(proof, *PLACE) and not any(key.is_proof(proof, *PLACE) for key in OTHERS)
    for seq, chain, tags in (
        (4, b"chain", PLACE[2]),
        (3, b"other", PLACE[2]),
        (3, b"chain", {"door": b"gat", "plan": b"tag"}),
        (3, b"chain", {"door": b"tag"}),
    ):
        assert not KEY.is_proof(proof, seq, chain, tags)
    assert not KEY.is_proof(b"", *PLACE) and not KEY.is_proof(proof[:-1], *PLACE)


def test_what_is_encrypted_opens_by_its_key_and_name_alone() -> None:
    encrypted = KEY.encrypt("door", b"-----BEGIN PRIVATE KEY-----")
    assert b"PRIVATE" not in encrypted and KEY.decrypt("door", encrypted) == b"-----BEGIN PRIVATE KEY-----"
    assert KEY.decrypt("door", KEY.encrypt("door", b"")) == b""
    assert encrypted[:TAG_BYTES] != KEY.encrypt("door", b"-----BEGIN PRIVATE KEY----.")[:TAG_BYTES]
    wrong = [(KEY, "plan", encrypted), *((key, "door", encrypted) for key in OTHERS)]
    for cut in (encrypted[:-1], encrypted[:-1] + bytes([encrypted[-1] ^ 1]), encrypted[1:], b"short", b""):
        wrong.append((KEY, "door", cut))
    for key, name, content in wrong:
        with pytest.raises(DecryptionError):
            key.decrypt(name, content)


def test_the_environment_of_a_release_is_encrypted_and_nothing_else() -> None:
    encoded = msgspec.msgpack.encode(SET)
    encrypted = KEY.encrypt_env(encoded)
    assert b"v4lue" not in encrypted and b"WANDB_API_KEY" in encrypted
    assert msgspec.msgpack.decode(KEY.decrypt_env(encrypted), type=Order) == SET
    assert encrypted == KEY.encrypt_env(encoded), "a decision that repeats it is written alike"
    assert KEY.decrypt_env(encoded) == encoded, "older versions have not encrypted it"
    other = msgspec.structs.replace(SET, release=None, who="env")
    assert msgspec.msgpack.decode(KEY.encrypt_env(msgspec.msgpack.encode(other)), type=Order) == other
