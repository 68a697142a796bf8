"""Fields of a request body that several protocols share: read with a type and bounds, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.records import Sampling

_NEUTRAL: dict[str, Any] = {
    "min_p": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "include_stop_str_in_output": False,
}
"""Fields that change the sampled distribution and are handed to the engine, with the value that changes nothing."""

_LONG_NUMBER = re.compile(rb"[0-9]{19}")
"""In any JSON that holds an integer beyond 64 bits."""
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
_BOM = b"\xef\xbb\xbf"
_ESCAPE = re.compile(rb"\\(?:u([dD][89abAB]..\\u[dD][c-fC-F]..)|u([dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in a JSON text: a pair of surrogates, half of one, or any other."""
_EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})
MAX_CHOICES = 16
MAX_CANDIDATES = 20


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    What an agent copies from a tool or from the model into its history must not end the run, so two things are taken
    as other services and JavaScript take them: half a surrogate pair, which is what cutting a text within a character
    leaves, is U+FFFD, and an integer beyond 64 bits, which could not be recorded, is the nearest float.

    Raises:
        ProtocolError: it is not one.
    """
    body = body.removeprefix(_BOM)
    try:
        fields = _decoded(body)
        fields = _bounded(fields) if _LONG_NUMBER.search(body) else fields
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        refuse("the body must be a JSON object", None)
    return fields


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        mended = _ESCAPE.sub(lambda found: rb"\ufffd" if found[2] else found[0], body)
        if mended == body:
            raise
    return msgspec.json.decode(mended)


def _bounded(value: Any) -> Any:
    """Return a JSON value in which no integer has more than 64 bits."""
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    if isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
        try:
            return float(value)
        except OverflowError:
            refuse(f"the body holds the integer {str(value)[:24]}..., which no number of 64 bits is near to", None)
    return value


def refuse_huge(value: Any, most: int) -> None:
    """Refuse a JSON value that holds an integer beyond 64 bits: it could not be recorded.

    Args:
        value: what was decoded.
        most: the largest integer.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, int) and not _LOWEST <= item <= most:
            refuse(f"the body holds the integer {str(item)[:24]}...; integers have 64 bits at most", None)


def refuse_given(fields: dict[str, Any], names: Sequence[str]) -> None:
    """Refuse a request that gives one of these fields a value that is not empty."""
    for name in names:
        if name in fields and fields[name] not in _EMPTY:
            refuse(f"{name} cannot be honoured by this service: it would change or hide what is sampled", name)


def refuse_kind(where: str, kind: object) -> NoReturn:
    """Refuse a part that is no text."""
    refuse(f"{where} has type {kind!r}; this model reads text only: leave it out, or say it in a text part", where)


def sampling(
    fields: dict[str, Any], *, limit: str, stop: str = "stop", greatest: float = 100.0, top_k_low: int = -1
) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        fields: the request's.
        limit: name of the field that bounds the answer's tokens.
        stop: name of the field with stop strings.
        greatest: largest temperature.
        top_k_low: smallest `top_k`; -1 and 0 mean no limit.
    """
    given = fields.get(stop)
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        refuse(f"{stop} must be a string or a list of strings", stop)
    ids = fields.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(whole(item) and 0 <= item < 1 << 31 for item in ids):
        refuse("stop_token_ids must be a list of token ids", "stop_token_ids")
    seed = None if fields.get("seed") is None else int(number(fields, "seed", 0, _LOWEST, (1 << 63) - 1, integer=True))
    extra = {
        name: fields[name]
        for name, neutral in _NEUTRAL.items()
        if name in fields and fields[name] is not None and fields[name] != neutral
    }
    return Sampling(
        temperature=float(number(fields, "temperature", 1.0, 0.0, greatest)),
        top_p=float(number(fields, "top_p", 1.0, 0.0, 1.0)),
        top_k=max(int(number(fields, "top_k", 0, top_k_low, 1 << 31, integer=True)), 0),
        max_tokens=min(int(number(fields, limit, 0, 1, 1 << 63, integer=True)), 1 << 31),
        stop=tuple(item for item in stops if item),
        stop_token_ids=tuple(map(int, ids)),
        seed=seed,
        extra=extra,
    )


def number(
    fields: dict[str, Any], name: str, default: float, low: float, high: float, *, integer: bool = False
) -> float:
    """Return a number within bounds."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or (integer and not whole(value)):
        refuse(f"{name} must be {'an integer' if integer else 'a number'}, not {value!r}", name)
    if not low <= value <= high:
        refuse(f"{name} is {value!r}; it must be between {low:g} and {high:g}", name)
    return value


def whole(value: Any) -> bool:
    """Tell whether a value is an integer, possibly written as a float."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def flag(fields: dict[str, Any], name: str) -> bool:
    """Return a boolean; False when it is missing."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(f"{name} must be true or false", name)
    return bool(value)


def text(fields: dict[str, Any], name: str) -> str:
    """Return a string; empty when it is missing."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        refuse(f"{name} must be a string", name)
    return value or ""


def refuse(message: str, param: str | None) -> NoReturn:
    """Raise the error of a field that is wrong."""
    raise ProtocolError(message, param=param, code="invalid_value" if param else "invalid_request")
