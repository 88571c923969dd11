"""Secrets are masked, and what diagnoses are made of stays whole."""

import json
import logging
import os
import subprocess
import sys
from urllib.parse import quote

import msgspec
import pytest

from holdfast.core.terminal_sanitizer import CUT
from holdfast.logs.secret_masking import (
    Masker,
    MaskingFormatter,
    env_secrets,
    last_bytes,
    trim_line,
)
from holdfast.model.detector_alarm import Alarm, Kind

HEX40 = "0123456789abcdef0123456789abcdef01234567"
LONG = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY"  # what follows a token's prefix
# In two parts where the whole would be taken for a real one by tools that look for such.
SECRETS = [
    ("login with {}", "hf_" + LONG),
    ("this token is used: {}", "hf-node." + HEX40[:16] + "." + HEX40[:32]),
    ("remote: {} rejected", "ghp_" + LONG),
    ("git clone https://x:{}@github.com/o/r.git", "ghs_" + LONG),
    ("pat={}", "github_pat_" + LONG),
    ("GITLAB {}", "glpat-" + LONG[:20]),
    ("openai.AuthenticationError: Incorrect API key provided: {}.", "sk-" + LONG),
    ("key {} is not valid", "sk-ant-api03-" + LONG),
    ("botocore: access key {} denied", "AKIA" + "IOSFODNN7EXAMPLE"),
    ("aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"),
    ("'SecretAccessKey': '{}'", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"),
    ("export AWS_SECRET_ACCESS_KEY={}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"),
    ("AWS_SESSION_TOKEN={}", "IQoJb3JpZ2luX2VjEXAMPLE" + LONG),
    ("cookie jar eyJ? {}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0." + LONG),
    ("Authorization: Bearer {}", LONG),
    ("{{'Authorization': 'Bearer {}'}}", LONG),
    ("headers={{'authorization': 'Basic {}'}}", "amFuZTpjb3JyZWN0aG9yc2U="),
    ("x-api-key: {}", LONG),
    ("requests.exceptions.ProxyError: http://{}@proxy.example.org:3128", "jane:correcthorse"),
    ("postgresql://{}@db.example.org:5432/x", "jane:p@ss:w0rd"),
    ("redis.exceptions: redis://{}@cache.example.org", ":correcthorse"),
    ("key: -----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----", "MIIEow" + LONG),
    ("password={}", "hunter2"),
    ("Password: {}", "hunter2"),
    ('{{"db_password": "{}"}}', "correct horse battery"),
    ("DB_PASSWD={} python train.py", "hunter2"),
    ("client_secret='{}'", LONG),
    ("api_key: {}", LONG),
    ("args: --wandb_api_key {} --lr 1e-4", "short-key"),
    ("train.py --token {} --epochs 3", "abcdefgh"),
    ("Namespace(lr=0.1, hf_token='{}', epochs=3)", "abcdefghijkl"),
    ("token={}", "abcdefghijklmnop"),
    ("wandb: Appending key for api.wandb.ai: {}", HEX40),
    ("WANDB_API_KEY={}", HEX40),
    ("wandb login --relogin {}", HEX40),
    ("machine api.wandb.ai login user password {}", HEX40),
    ("https://hooks.slack.com/services/{}", "T00000000/B00000000/" + "X" * 24),
    ("GET https://b.s3.example.org/k?X-Amz-Credential={}&X-Amz-Expires=60", "AKIAEXAMPLE%2F20260101%2Fus-east-1"),
    ("GET https://b.s3.example.org/k?X-Amz-Expires=60&X-Amz-Signature={}", HEX40),
    ("https://acct.blob.core.windows.net/c?sv=2024&sig={}", "abc%2Bdef%3D"),
    ("AccountKey={};EndpointSuffix=core.windows.net", "a" * 30 + "0=="),
    ("google: {}", "AIza" + LONG + LONG[:6]),
    ("slack {}", "xoxb-" + "1234567890-" + LONG),
    ("mailed {} about it", "jane.roe+train@mail.example.org"),
    ("+ curl -fsS -u {} https://api.example.org", "jane:correcthorse"),
    ("Set-Cookie: {}", "session=abcdef; Path=/; HttpOnly"),
    ("identity {}", "AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
    ("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\\n{}", LONG),
    ("-----BEGIN PGP PRIVATE KEY BLOCK-----\\n{}", LONG),
    ("{{b'Authorization': b'Bearer {}'}}", LONG),
    ("(b'authorization', b'token {}')", LONG),
    ("[('Authorization', 'Bearer {}')]", "abcdefghijklmnop"),
    ("Bearer {} was refused", "abcdefghijklmnopqrstuvwxyzabcd"),
    ("Proxy-Authorization: Basic {}", "amFuZTpjb3JyZWN0aG9yc2U="),
    ("bedrock {}", "ABSK" + "QmVkcm9ja0FQSUtleS" + LONG * 3),
    ("the session has {}", "IQoJb3JpZ2lu" + "X2VjEXAMPLE" + LONG),
    ("key {} denied", "A3TX" + "IOSFODNN7EXAMPLE0"),
    ("databricks: {}", "dapi" + HEX40[:32]),
    ("stripe: {}", "sk_test_" + LONG[:24]),
    ("shop: {}", "shpca_" + HEX40[:32]),
    ("issues: {}", "ATATT3xFf" + LONG),
    ("notion: {}", "ntn_" + "12345678901" + LONG),
    ("figma: {}", "figd_" + LONG),
    ("postman: {}", "PMAK-" + HEX40[:24] + "-" + HEX40[:34]),
    ("pulumi: {}", "pul-" + HEX40),
    ("grafana: {}", "glsa_" + LONG + "_1a2b3c4d"),
    ("sentry: {}", "sntryu_" + HEX40 + HEX40[:24]),
    ("doppler: {}", "dp.pt." + LONG + LONG[:11]),
    ("planetscale: {}", "pscale_tkn_" + LONG),
    ("openshift: {}", "sha256~" + LONG + LONG[:11]),
    ("twilio: {}", "SK" + HEX40[:32]),
    ("a bot: {}", "123456789:" + "AA" + LONG + "x"),
    ("azure: {}", "abc8Q~" + LONG + "ab"),
    ("neptune: {}", "eyJhcGlfYWRkcmVzcyI6" + LONG),
    ("vault: {}", "hvs." + LONG),
    ("grok: {}", "xai-" + LONG * 2),
    ("openai: {}", "sk-proj-" + LONG),
    ("volcano: {}", "AKLT" + LONG),
    ("tencent: {}", "AKID" + LONG),
    ("Server=tcp:db.example.org;Uid=jane;Pwd={};", "correcthorse"),
    ("mysql_pwd={}", "hunter22"),
    ('{{"registry.example.org": {{"auth": "{}"}}}}', "amFuZTpjb3JyZWN0aG9yc2U="),
    ("postgres://jane:{}@db.example.org/x?sslmode=require", "correct%20horse"),
    ("hf_token='{} ...", "abcdefghijk lmnop"),  # the text was cut before the end of its quotes
    ('password="{} ...', "correct horse battery"),
    ("a text that was cut: {} ...", "ghp_aB3dE5"),
]
ORDINARY = [
    f"HEAD is now at {HEX40} fix the loader",
    "wandb: Tracking run with wandb version 0.17.0",
    f"wandb: git commit {HEX40}",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 768x1024)",
    "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
    "torch.Size([8, 2048, 4096]) dtype=torch.bfloat16 device=cuda:3",
    "CUDA error: an illegal memory access at 0x7f3a5c000000 (pc 0x00007ffd2b7a1c40)",
    "frame #3: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long> >) + 0x282",
    "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "NVRM: Xid (PCI:0000:c1:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
    "GPU-8a56a4bc-3184-1e7c-4a8f-b6f2d7d0b6a1: uncorrectable ECC error",
    "[rank3]:[E1115 10:22:33.123456789 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout",
    "step 100 loss 2.3456 grad_norm 0.98 tokens/s 123456 tokens: 4096 max_tokens=2048 token_count: 12",
    "Tokenizer(vocab_size=32000, pad_token='<pad>', eos_token_id=2, bos_token=None)",
    "special token: [PAD] added; num_tokens: 8192",
    "KeyError: 'token_type_ids'",
    "comet_ml.exceptions.InvalidAPIKey: The key is invalid",
    "TypeError: forward() got an unexpected keyword argument 'secret_sauce'",
    'Error: secret "regcred" not found',
    "File \"/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py\", line 1736, in _wrapped_call_impl",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08: image pull failed",
    "loss_scale: 65536 basic block, bearer of bad news, basic training",
    "fatal: unable to access 'https://github.com/org/repo.git/': Could not resolve host: github.com",
    "git@github.com:org/repo.git: Permission denied (publickey).",
    "s3://bucket/prefix/shard-00042.tar: An error occurred (SlowDown) when calling the GetObject operation",
    "slurmstepd: error: *** JOB 123456 ON n0017 CANCELLED AT 2026-11-15T10:00:00 DUE TO TIME LIMIT ***",
    "nvidia-curand-cu12==10.3.5.147 libcurand.so.10.3.5.147 cudnn 9.10.2.21",
    "@torch.compile(mode='max-autotune') def step(x @ w)",
    "keys: missing ['lm_head.weight'], unexpected ['score.weight']; sort_key=length",
    "checkpoint key model.layers.0.attn.key.weight: shape mismatch; api_key_missing=False",
    f"Merge commit '{HEX40}' into main; release 4 {HEX40[:12]} (git {HEX40[:10]})",
    f"weights sha256: {HEX40}{HEX40[:24]}, md5 9e107d9d372bb6826bd81d3542a419d6",
    f"image registry.example.org/trainer@sha256:{HEX40}{HEX40[:24]}",
    f"/data/runs/{HEX40[:12]}/checkpoints/step-000100/rank-00003-of-02048.bin",
    "checkpoint gs://bucket/run/step_100/model-00001-of-00004.safetensors",
    "environment py311_cu124_torch2.6_20241015_nightly at /opt/conda/envs/sk-learn-contrib-packages",
    "pip install sk-image-processing-toolkit task-scheduler-configuration-file hf_xet-1.1.0",
    "job 123e4567-e89b-12d3-a456-426614174000, mac 00:1A:AA:3f:00:01, PWD=/data OLDPWD=/tmp pwd: /data",
    "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19 fw_ver_2024_release_candidate",
    "bearer_token_file missing; authorization failed for n3; author: Jane; sk_buff allocation failed",
    "aten::_scaled_dot_product_flash_attention_backward torch._dynamo.config.recompile_limit",
    "frame #12: at::native::(anonymous namespace)::cat_out_cuda + 0x1234 (0x7f3a5c000000 in /opt/lib/libtorch_cuda.so)",
    "/mnt/Shared/Projects/BigModel/TrainingData/Shards/Part0001/Rank07",
    "tokens: 4096 ... tokenizer, sk-learn ... and hf_ ... are words",
]  # fmt: skip


@pytest.mark.parametrize(("line", "secret"), SECRETS, ids=[line[:30] for line, _ in SECRETS])
def test_no_part_of_a_secret_stays(line: str, secret: str) -> None:
    masked = Masker(hosts=False)(line.format(secret))
    assert secret not in masked
    assert not [part for part in secret.split() if len(part) > 5 and part in masked]
    assert "<" in masked


@pytest.mark.parametrize("line", ORDINARY, ids=[line[:30] for line in ORDINARY])
def test_ordinary_lines_stay_whole(line: str) -> None:
    assert Masker(hosts=True)(line) == line


def test_what_surrounds_a_secret_stays() -> None:
    mask = Masker(hosts=False)
    assert mask("connect https://jane:horse@git.example.org/r failed") == (
        "connect https://<credentials>@git.example.org/r failed"
    )
    assert mask("password=hunter2, user=x") == "password=<secret>, user=x"


def test_a_private_key_is_masked_line_by_line() -> None:
    body = ["MIIEow" + LONG * 2, LONG + "/+" + LONG[:30], LONG + LONG[:10] + "=="]
    whole = ["begin", "-----BEGIN RSA PRIVATE KEY-----", *body, "short", "-----END RSA PRIVATE KEY-----", "after"]
    mask = Masker(hosts=False)
    for first in range(len(whole)):
        masked = mask.mask_lines(whole[first:])
        assert masked[-1] == "after" and not any(part in line for part in body for line in masked)
    assert mask.mask_lines(whole)[0] == "begin" and mask.mask_lines(whole).count("<private key>") == 6
    hashes = [HEX40, HEX40.upper(), HEX40 + HEX40[:24]]
    assert mask.mask_lines(hashes) == (*hashes,), "diagnoses depend on them"


@pytest.mark.parametrize("prefix", ["[rank 3] ", "2026-11-19 17:00:00,123 INFO loader: ", "\t"])
def test_a_line_of_a_key_is_known_behind_what_a_log_puts_before_it(prefix: str) -> None:
    assert Masker(hosts=False).mask_lines([prefix + LONG + LONG]) == ("<private key>",)
    assert Masker(hosts=False).mask_lines([prefix + HEX40 + HEX40[:24]]) == (prefix + HEX40 + HEX40[:24],)


def test_a_key_of_putty_is_masked() -> None:
    lines = ["PuTTY-User-Key-File-3: ssh-ed25519", "Private-Lines: 2", "aB3/", "cD4+", "Private-MAC: " + HEX40, "after"]
    assert Masker(hosts=False).mask_lines(lines) == (*["<private key>"] * 5, "after")


def test_an_alarm_keeps_what_decides() -> None:
    alarm = Alarm(
        kind=Kind.CRASH,
        at=1.0,
        suspects=("hf_" + LONG,),  # whatever a node is called, it is that node
        ranks=(3,),
        code=1,
        klass="python_exception",
        raised="RuntimeError",
        reason="exited with code 1 (RuntimeError: password=hunter2)",
        signature="python_exception 1 train.py:3",
        evidence=("RuntimeError: password=hunter2",),
    )
    masked = Masker(hosts=False).mask_alarm(alarm)
    quoted = "RuntimeError: password=<secret>"
    assert masked == msgspec.structs.replace(alarm, reason=f"exited with code 1 ({quoted})", evidence=(quoted,))


def test_a_tree_keeps_who_and_what_and_loses_secrets() -> None:
    tree = {
        "text": "password=hunter2",
        "others": ["token=abcdefghijkl"],
        "owner": "ann@example.org",
        "release": {"env": {"LR": "0.1", "HUB_PASSWORD": "x"}, "digest": HEX40, "number": 3},
        "at": 1.5,
        "none": None,
    }
    assert Masker(hosts=False, people=False).mask_tree(tree) == {
        "text": "password=<secret>",
        "others": ["token=<secret>"],
        "owner": "ann@example.org",
        "release": {"env": {"LR": "...", "HUB_PASSWORD": "..."}, "digest": HEX40, "number": 3},
        "at": 1.5,
        "none": None,
    }
    assert Masker(hosts=False, people=False)("release 3 of ann@example.org") == "release 3 of ann@example.org"


def test_lines_of_our_logs_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    mask = Masker(hosts=False)
    mask.learn(["correct-horse-battery", "short"])
    try:
        raise ValueError("with correct-horse-battery and password=hunter2; a short one stays")
    except ValueError:
        record = logging.LogRecord("holdfast", logging.WARNING, __file__, 1, "it %s", ("failed",), sys.exc_info())
    told = MaskingFormatter(mask).format(record)
    assert told.splitlines()[0].endswith(" it failed")
    assert told.splitlines()[-1] == "  ValueError: with <secret> and password=<secret>; a short one stays"


def test_a_text_that_a_log_quotes_cannot_pose_as_an_entry() -> None:
    mask = Masker(hosts=False, known=["correct-horse-battery"])
    args = ("a\nholdfast: n0 evicted\x1b]0;PWN\x07 \x1b[31m\u202ecorrect-\x1b[0mhorse-battery",)
    told = MaskingFormatter(mask).format(logging.LogRecord("h", logging.INFO, __file__, 1, "in %s", args, None))
    first, second = told.split("\n")
    assert first.endswith(" in a") and second == "  holdfast: n0 evicted <secret>"


_LEAVES_WORDS = """
import gc, logging, os, sys, threading, warnings
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
word = os.environ["A_TOKEN"]
def fails():
    raise ValueError(f"in a thread: {word}")
class Left:
    def __del__(self):
        raise ValueError(f"in a finalizer: {word}")
thread = threading.Thread(target=fails)
thread.start()
thread.join()
Left()
gc.collect()
warnings.warn(f"a warning: {word}")
logging.warning("misfit of %d", word)
raise ValueError(f"at the end: {word} and https://jane:{word}@example.org")
"""


def test_what_nobody_catches_is_masked_as_well() -> None:
    env = {**os.environ, "A_TOKEN": "correct-horse-battery"}
    command = [sys.executable, "-c", _LEAVES_WORDS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "correct-horse-battery" not in done.stdout + done.stderr
    for what in ("in a thread", "in a finalizer", "a warning", "at the end"):
        assert f"{what}: <secret>" in done.stderr
    assert "https://<credentials>@example.org" in done.stderr


def test_hosts_have_the_same_name_throughout() -> None:
    mask = Masker(hosts=True, names=["gpu-a17"])
    assert mask("from 10.1.2.3:29500 to 192.168.0.9") == "from <ip-1>:29500 to <ip-2>"
    assert mask("10.1.2.3 lost gpu-a17") == "<ip-1> lost <host-1>"
    assert mask("gpu-a17: x.svc.cluster.local ip-10-0-0-7") == "<host-1>: <host-2> <host-3>"
    assert mask("open /home" + "/jane/train.py") == "open /home" + "/<user-1>/train.py"
    assert Masker(hosts=False)("from 10.1.2.3") == "from 10.1.2.3"


def test_what_the_environment_calls_a_secret() -> None:
    env = {
        "MY_API_KEY": "pl4in-looking-words",
        "SSH_AUTH_SOCK": "/tmp/agent.1",
        "HOME_TOKEN": "short",
        "PATH": "/usr/bin",
    }
    mask = Masker(hosts=False, known=env_secrets(env))
    assert mask("got pl4in-looking-words from /tmp/agent.1, short") == "got <secret> from /tmp/agent.1, short"


def test_a_known_secret_is_masked_however_it_is_written() -> None:
    secret = "p@ss/w\"o'rd\\\u00fc\n100%"
    mask = Masker(hosts=False, known=[secret])
    for written in (
        secret,
        quote(secret, safe=""),
        json.dumps(secret),
        repr(secret),
        f"GET /?x={quote(secret, safe='')}",
    ):
        assert "w" not in mask(written), written


def test_names_that_only_look_like_those_of_secrets() -> None:
    counts = {"MAX_TOKENS": "1000000000", "TOKENIZER_PATH": "meta-llama-3", "GIT_AUTHOR_NAME": "Jane Roe"}
    secrets = {"API_TOKENS": "one-and-two", "PROXY_AUTHORIZATION": "amFuZTpob3JzZQ", "MYSQL_PWD": "hunter222"}
    assert env_secrets(counts | secrets) == list(secrets.values())


def test_each_line_of_a_secret_is_known() -> None:
    lines = ["first-half-of-it", "tiny", "  second-half-of-it"]
    mask = Masker(hosts=False, known=env_secrets({"MY_CREDENTIALS": "\n".join(lines)}))
    assert mask.mask_lines(["got first-half-of-it", "tiny", "second-half-of-it"]) == (
        "got <secret>",
        "tiny",
        "<secret>",
    )
    assert mask("all: " + "\n".join(lines)) == "all: <secret>"


def test_a_key_may_begin_like_a_path() -> None:
    keys = {
        name: f"{start}9wJalrXUtnFEMI/K7MDENG+bPx" for name, start in (("A_KEY", "/"), ("B_KEY", "~"), ("C_KEY", "."))
    }
    paths = {"D_KEY": "/tmp/not-there/key.pem", "E_KEY": "~/key.pem", "F_KEY": "./key.pem", "G_KEY": "../key.pem"}
    assert env_secrets(keys | paths) == list(keys.values())


@pytest.mark.parametrize("kept", [8, 11, 20])
def test_the_head_of_a_known_secret_is_masked_where_a_text_was_cut(kept: int) -> None:
    mask, secret = Masker(hosts=False, known=["correct-horse-battery"]), "correct-horse-battery"
    assert mask(f"no login with {secret[:kept]}") == "no login with <secret>"
    assert mask(f"exited with code 1 (no login with {secret[:kept]}{CUT}; and more)") == (
        f"exited with code 1 (no login with <secret>{CUT}; and more)"
    )
    assert mask(f"a {secret[:kept]}, whole") == f"a {secret[:kept]}, whole"
    line = f"{'x' * (300 - kept)}{secret}"[:300]
    alarm = Alarm(kind=Kind.LINES, at=1.0, reason="", suspects=(), evidence=(line,))
    assert mask.mask_alarm(alarm).evidence == (f"{'x' * (300 - kept)}<secret>",)


def test_the_end_of_a_text_is_masked_before_it_is_cut() -> None:
    body = [LONG + LONG[:24]] * 20
    key = ["-----BEGIN PRIVATE KEY-----", *body, LONG[:12] + "==", "-----END PRIVATE KEY-----"]
    mask = Masker(hosts=False)
    for first in range(len(key)):
        end = mask.mask_end("\n".join([*key[first:], "failed", ""]), 60)
        assert end.endswith("<private key>\nfailed") and len(end) <= 60 and LONG[:8] not in end
    assert mask.mask_end("token=" + "a" * 100, 20) == "token=<secret>"


def test_the_last_line_is_masked_before_it_is_cut() -> None:
    mask = Masker(hosts=False)
    said = mask.mask_last_line("first\n" + "x" * 280 + " password=" + "correct-horse" * 9 + "\n \n", 300)
    assert said.startswith("xxx") and "corr" not in said and len(said) <= 300
    key = ["-----BEGIN PRIVATE KEY-----", *[LONG * 2] * 20, LONG[:12] + "=="]
    assert mask.mask_last_line("\n".join(key), 300) == "<private key>"
    assert mask.mask_last_line(" \n", 300) == ""


def test_a_word_that_a_cut_made_shorter_is_dropped() -> None:
    token = "hf_" + LONG
    text = f"{'x' * 20} {token} end".encode()
    for most in range(4, len(text)):
        left = last_bytes(text, most).decode()
        assert token in left or not any(left.startswith(token[n:]) for n in range(1, len(token))), left
    assert last_bytes(text, len(text)) == text
    line = "word " * 3276 + token  # 16,380 characters, and the token across the limit
    assert trim_line(line) == "word " * 3276 + CUT and trim_line(line[:16384]) == line[:16384]
    assert trim_line("x" * 20_000) == "(one long word)" + CUT
