"""Secrets of variables and command lines are known in parts and as others write them; ordinary words stay readable."""

import base64
import json
import re
from urllib.parse import quote, quote_plus

import pytest

from holdfast.logs.secret_masking import Masker, argv_secrets, env_secrets
from tests.logs.test_secret_masking import HEX40, LONG


@pytest.mark.parametrize("secret", ["aB3/dE5 f'G\"7\\h+J9", "pl4in?>key~~~value"])
def test_a_known_secret_is_masked_as_json_addresses_and_base64_write_it(secret: str) -> None:
    mask, raw = Masker(hosts=False, known=[secret]), secret.encode()
    for written in (
        quote(secret),
        quote_plus(secret),
        re.sub("%..", lambda m: m[0].lower(), quote(secret, safe="")),
        json.dumps({"said": secret}, ensure_ascii=False).replace("/", r"\/")[10:-2],
        repr(raw)[2:-1],
        repr([secret, "'", '"'])[2:].partition("', ")[0],
    ):
        assert mask(f"x {written} y").replace("<secret>", "").strip("x y") == "", written
    for encoded in (base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()):
        assert mask(f"x {encoded}").rstrip("=") == mask(f"x {encoded.rstrip('=')}") == "x <secret>"


PARTS = {
    "A_TOKEN": ("trailing-one-1\r", ["trailing-one-1"]),
    "B_TOKEN": ("  trailing-two-2  ", ["trailing-two-2"]),
    "OPENAI_API_KEYS": ("first-key-11,second-key-22; third-key-33 fourth-key-44", ["second-key-22", "fourth-key-44"]),
    "LISTED_API_KEYS": ('["listed-key-11", "listed-key-22"]', ["listed-key-22"]),
    "BASIC_AUTH": ("jane:correcthorse", ["correcthorse"]),
    "DB_AUTH": ("postgres://jane:p@ss:w0rd-77@db:5432/x", ["p@ss:w0rd-77"]),
    "TWO_AUTH": ("jane:pa55word-1,bob:pa55word-2", ["pa55word-1", "pa55word-2"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_secret_are_known(name: str) -> None:
    value, parts = PARTS[name]
    mask = Masker(hosts=False, known=env_secrets({name: value}))
    for part in parts:
        assert mask(f"denied ({part}) again") == "denied (<secret>) again"


def test_ordinary_words_in_secrets_are_not_known() -> None:
    env = {
        "AUTH_MODES": "kerberos,passwords,gpt",
        "MY_PASSPHRASE": "gradients of training explode",
        "MY_CREDENTIALS": '{"type": "service_account", "project_id": "training-project"}',
        "KUBE_AUTH": "apiVersion: v1\nclusters: all of them",
        "TLS_KEY": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow" + LONG + "\n-----END RSA PRIVATE KEY-----",
        "CALL_AUTH": "https://auth.example.org:8443/login,jane:pw",
    }
    mask = Masker(hosts=False, known=env_secrets(env))
    for line in (
        "kerberos gradients training explode passwords",
        "service_account project_id training-project",
        "apiVersion: v2 clusters: none",
        "-----BEGIN CERTIFICATE-----",
        f"at commit {HEX40} in /tmp/run/job.py, auth.example.org:8443/login",
    ):
        assert mask(line) == line
    assert mask(f"body MIIEow{LONG}") == "body <secret>"


ARGV = [
    "job.py", "--hub-token", "ArgTok55aaQQ1", "--wandb_key=ArgKey66bbRR2", "hydra.api_key=ArgKey77ccSS3", "--api-key",
    "--password", "12345678", "--lr", "3e-4",
]  # fmt: skip


def test_secrets_of_a_command_line_are_masked() -> None:
    mask = Masker(hosts=False)
    assert mask.mask_argv(ARGV) == [
        "job.py", "--hub-token", "<secret>", "--wandb_key=<secret>", "hydra.api_key=<secret>", "--api-key",
        "--password", "<secret>", "--lr", "3e-4",
    ]  # fmt: skip
    assert argv_secrets(ARGV) == ["ArgTok55aaQQ1", "ArgKey66bbRR2", "ArgKey77ccSS3", "12345678"]
    shown = mask.mask_commands({"releases": [{"argv": ARGV, "env": {"A": "b"}, "digest": HEX40}], "argv": 3})
    assert shown == {"releases": [{"argv": mask.mask_argv(ARGV), "env": {"A": "b"}, "digest": HEX40}], "argv": 3}
    assert mask.mask_tree({"argv": tuple(ARGV)}) == {"argv": mask.mask_argv(ARGV)}


def test_what_is_no_secret_of_a_command_line_stays() -> None:
    argv = [
        "train.py", "--max-tokens", "1000000000", "--pad-token-id", "50256", "--token-dropout=0.1", "--passes", "3",
        "--use-auth-token", "true", "--key", "/tmp/key.pem", "--tokenizer", "meta-llama/Llama-3", "--commit", HEX40,
        "--hub-token", "--author", "jane", "-v", "lr=3e-4", "--", "data/train.bin",
        "--sort-key", "timestamp", "--auth=kerberos", "--primary_key", "sample_id",
    ]  # fmt: skip
    assert Masker(hosts=False).mask_argv(argv) == argv
    assert argv_secrets(argv) == argv_secrets(["--hub-token", "batteries"]) == []
