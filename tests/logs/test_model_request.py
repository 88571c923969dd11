"""Where questions go."""

import pytest

from holdfast.config import ConfigError, load
from holdfast.logs.model_request import completions_url


@pytest.mark.parametrize(
    ("url", "goes_to"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/chat/completions"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/chat/completions"),
        ("https://llm.example.org/v1", "https://llm.example.org/v1/chat/completions"),
        ("https://llm.example.org/openai/v1/", "https://llm.example.org/openai/v1/chat/completions"),
        ("https://llm.example.org/x/chat/completions", "https://llm.example.org/x/chat/completions"),
    ],
)
def test_addresses(url: str, goes_to: str) -> None:
    assert completions_url(url) == goes_to


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ({"url": "llm.example.org", "name": "m"}, "http"),
        ({"url": "file:///etc/passwd", "name": "m"}, "http"),
        ({"url": "http://jane:pw@llm.example.org", "name": "m"}, "model.key_env"),
        ({"url": "http://llm.example.org"}, "model.name"),
        ({"timeout_s": "0"}, "model.timeout_s"),
        ({"below": "1.5"}, "model.below"),
        ({"chars": "10"}, "model.chars"),
    ],
)
def test_settings_that_are_refused(pairs: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(None, [(f"model.{name}", value) for name, value in pairs.items()])
