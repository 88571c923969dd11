"""Asks a language model at an OpenAI-compatible endpoint: one question, three samples, within one deadline."""

import asyncio
import math
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from holdfast.config import ModelLimits
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.decoding import from_json

_ANSWER_BYTES = 1 << 20
_ANSWER_TOKENS = 1500
_DETAIL_CHARS = 160
_BUSY = (429, 503)
_NOT_UNDERSTOOD = (400, 422)  # what servers say that do not know a field of the question
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TEMPERATURES = (0.0, 0.7, 0.7)  # of the samples: what the model says first, and twice what it might also say
SAMPLES = len(_TEMPERATURES)

Messages = list[dict[str, str]]


class NoAnswer(Exception):
    """There is no usable answer; the message completes a sentence that begins with "the language model"."""


class ModelQuestion(msgspec.Struct, frozen=True, kw_only=True):
    messages: Messages
    schema: dict[str, Any]  # of the answer


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _Got(msgspec.Struct):
    status: int
    after: str
    body: bytes


def ask_model(question: ModelQuestion, limits: ModelLimits, key: str) -> list[str | NoAnswer]:
    """Return the model's raw replies, one for each sample. A missing reply is replaced by the NoAnswer that says why.
    The call ends by the deadline."""
    return asyncio.run(_ask_within(question, limits, key))


def completions_url(url: str) -> str:
    """Return the address for posting questions; `url` may be the server, its /v1 path, or the full address."""
    url = url.rstrip("/")
    if url.endswith("/chat/completions"):
        return url
    return f"{url}/chat/completions" if urlsplit(url).path else f"{url}/v1/chat/completions"


async def _ask_within(question: ModelQuestion, limits: ModelLimits, key: str) -> list[str | NoAnswer]:
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    host = urlsplit(limits.url).hostname or ""
    # A proxy between this host and itself can only be a mistake.
    trusting = host not in _LOOPBACK
    async with aiohttp.ClientSession(headers=headers, auto_decompress=False, trust_env=trusting) as session:
        return await asyncio.gather(*(_take_sample(session, question, limits, t) for t in _TEMPERATURES))


async def _take_sample(
    session: aiohttp.ClientSession, question: ModelQuestion, limits: ModelLimits, temperature: float
) -> str | NoAnswer:
    try:
        async with asyncio.timeout(limits.timeout_s) as deadline:
            until = deadline.when() or math.inf
            return _reply_text(await _ask_patiently(session, question, limits, temperature, until))
    except NoAnswer as e:
        return e
    except TimeoutError:
        return NoAnswer(f"has not answered within {limits.timeout_s:g} s")
    except (aiohttp.ClientError, OSError, UnicodeError) as e:
        return NoAnswer(f"cannot be reached at {limits.url}: {cut_words(str(e), _DETAIL_CHARS) or type(e).__name__}")


async def _ask_patiently(
    session: aiohttp.ClientSession, question: ModelQuestion, limits: ModelLimits, temperature: float, until: float
) -> bytes:
    """Return the body of the answer, or raise NoAnswer. If the server is busy and names a wait time, ask once more
    after this time. If it rejects the form of the request, ask once more without schema and other options."""
    bare: dict[str, Any] = {"model": limits.name, "messages": question.messages}
    shape = {"type": "json_schema", "json_schema": {"name": "diagnosis", "strict": True, "schema": question.schema}}
    full = bare | {"temperature": temperature, "max_tokens": _ANSWER_TOKENS, "response_format": shape}
    got = await _post_question(session, limits.url, full)
    if got.status in _NOT_UNDERSTOOD:
        got = await _post_question(session, limits.url, bare)
    elif got.status in _BUSY and (wait_s := _retry_seconds(got.after)) is not None:
        if asyncio.get_running_loop().time() + wait_s >= until:
            raise NoAnswer(f"is busy (HTTP {got.status}) and asks for a retry in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        got = await _post_question(session, limits.url, full)
    if 300 <= got.status < 400:
        raise NoAnswer(f"at {limits.url} has moved (HTTP {got.status}); logs are not sent there, so correct model.url")
    if got.status != 200:
        raise NoAnswer(f"refused (HTTP {got.status}): {_error_detail(got.body)}")
    return got.body


async def _post_question(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> _Got:
    async with session.post(completions_url(url), json=body, allow_redirects=False) as response:
        read = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            read += chunk
            if len(read) > _ANSWER_BYTES:
                raise NoAnswer(f"sent more than {_ANSWER_BYTES >> 20} MB")
        return _Got(status=response.status, after=response.headers.get("Retry-After", ""), body=bytes(read))


def _reply_text(body: bytes) -> str:
    try:
        reply = from_json(body, _Reply)
    except msgspec.DecodeError:
        raise NoAnswer("sent no chat completion; check model.url") from None
    content = reply.choices[0].message.content if reply.choices else None
    if isinstance(content, list):  # in parts, as some servers have it
        content = "".join(str(part.get("text", "")) for part in content)
    if not content:
        raise NoAnswer("sent an empty answer")
    return content


def _retry_seconds(after: str) -> float | None:
    try:
        wait_s = float(after)
    except ValueError:  # a date, or nothing
        return None
    return wait_s if 0 <= wait_s < math.inf else None


def _error_detail(body: bytes) -> str:
    text = body[: 4 * _DETAIL_CHARS].decode("utf-8", "replace")
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return cut_words(words, _DETAIL_CHARS) or "no reason given"
