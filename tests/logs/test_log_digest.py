"""A digest keeps within its budget, and what is rare or grave is in it."""

import pytest

from holdfast.logs.log_digest import digest_log
from holdfast.logs.secret_masking import Masker

TRACE = [
    "[rank5]: Traceback (most recent call last):",
    '[rank5]:   File "/workspace/train.py", line 88, in main',
    "[rank5]:     loss.backward()",
    "[rank5]: ZorblaxError: the zorblax is out of phase (code 42)",
]


def log(steps: int) -> list[str]:
    lines = [f"step {n} loss {n / 3:.4f} grad_norm {n / 7:.3f}" for n in range(steps)]
    lines[steps // 2 : steps // 2] = TRACE
    return [*lines, *[f"[rank{n}]: Connection closed by peer" for n in range(8)]]


@pytest.mark.parametrize("budget", [3000, 24000])
@pytest.mark.parametrize("steps", [10, 50_000])
def test_the_cause_is_in_the_budget(steps: int, budget: int) -> None:
    found = digest_log(log(steps), budget=budget)
    text = found.format_text()
    assert len(text) <= budget
    assert all(line in text for line in TRACE)
    assert found.lines == steps + 12
    assert [line.raw for line in found.shown if "Zorblax" in line.raw] == [TRACE[-1]]
    numbers = [line.number for line in found.shown]
    assert numbers == sorted(set(numbers))
    assert steps // 2 + 1 in numbers


def test_templates_have_counts_and_places() -> None:
    found = digest_log(log(5000), budget=6000)
    step = next(t for t in found.templates if t.text.startswith("step"))
    assert (step.text, step.count, step.first, step.last) == ("step <n> loss <n> grad_norm <n>", 5000, 1, 5004)


def test_an_empty_log() -> None:
    assert digest_log([], budget=2000).lines == 0
    assert digest_log([b"\n"], budget=2000).shown == () or digest_log([b"\n"], budget=2000).format_text()


def test_secrets_are_masked_in_lines_and_in_templates() -> None:
    secret = "hf_" + "aB3dE5fG7h" * 3
    lines = [f"login {n} with {secret} as jane@example.org" for n in range(20)]
    lines += [f"ERROR: token {secret} rejected", "\x1b[31mcoloured\x1b[0m"]
    found = digest_log(lines, budget=4000, mask=Masker(hosts=True))
    text = found.format_text()
    assert "aB3" not in text
    assert "jane" not in text
    assert "<token>" in text
    assert "\x1b" not in text
    assert secret in "".join(line.raw for line in found.shown)  # which stays here
