"""Hosted models through litellm: requests in OpenAI's form, answers as deltas, errors with the provider's status.

litellm is imported when the first service with a hosted model starts, never otherwise. Provider keys come from the
service's environment; they are cut out of the provider's error texts.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp
import httpx

from gyre_sdk.errors import ProtocolError, SettingsError
from gyre_sdk.harness.proxy.answers.deltas import Deltas
from gyre_sdk.harness.proxy.dialects import Answer, Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall, ToolChoice

_INSTALL = "hosted models need litellm; run: pip install 'gyre-sdk[providers]'"
_PASSED = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling fields beyond the basic ones that providers know under the same names."""
_FINISHES = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
PROVIDER_ERROR = "provider_error"
"""Code of an error to which the provider gave none."""
_RETRYABLE = (408, 409, 425, 429)
_LOST = (ConnectionError, httpx.NetworkError, httpx.ProtocolError, aiohttp.ClientConnectionError)


def require_litellm() -> None:
    """Check that litellm can be imported.

    Raises:
        SettingsError: it is not installed.
    """
    if importlib.util.find_spec("litellm") is None:
        raise SettingsError(_INSTALL)


def load_litellm() -> Any:
    """Return litellm, imported without a look at the network. Takes seconds the first time.

    Raises:
        SettingsError: it is not installed.
    """
    require_litellm()
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def parameters(request: ModelRequest, max_tokens: int | None) -> dict[str, Any]:
    """Return what a provider is asked beside the model and the messages; what the agent did not ask stays out.

    Args:
        request: the agent's.
        max_tokens: limit on sampled tokens; None leaves it to the provider.

    Raises:
        ProtocolError: the request asks for what hosted models do not have.
    """
    fields, sampling = request.fields, request.sampling
    if request.logprobs:
        raise _unknown("logprobs")
    if sampling.stop_token_ids:
        raise _unknown("stop_token_ids")
    asked: dict[str, Any] = {"tools": list(request.tools)} if request.tools else {}
    for name in sampling.extra:
        if name not in _PASSED:
            raise _unknown(name)
        asked[name] = sampling.extra[name]
    asked |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k") if fields.get(name)}
    if fields.get("temperature") == 0:
        asked["temperature"] = 0.0
    if sampling.seed is not None:
        asked["seed"] = sampling.seed
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if max_tokens is not None:
        asked["max_tokens"] = max_tokens
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else fields.get("reasoning_effort")
    if isinstance(effort, str):
        asked["reasoning_effort"] = effort
    if request.tools:
        asked |= _tool_choice(request)
    if request.structured is not None:
        asked["response_format"] = _format(request.structured)
    return asked


def wire_messages(messages: Sequence[Message], prefill: str = "") -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, a prefill as the assistant's last one: whether it is continued is the provider's.

    Earlier thinking stays out: providers take back their own signed form only.
    """
    return [_wire(message) for message in (*messages, *([Message("assistant", prefill)] if prefill else ()))]


class Reading:
    """A provider's stream on its way to an answer."""

    def __init__(self) -> None:
        self.finish: str | None = None
        """`stop`, `length` or `tool_calls`; None until the provider said so."""
        self._deltas = Deltas()
        self._call: int | None = None
        self._begun: set[int] = set()

    def take(self, chunk: Any) -> list[Delta]:
        """Take a chunk; return what is new.

        Raises:
            ProtocolError: the provider mixes the arguments of parallel tool calls.
        """
        for choice in chunk.choices:
            delta = choice.delta
            self._deltas.text(Part.REASONING, getattr(delta, "reasoning_content", None) or "")
            self._deltas.text(Part.CONTENT, delta.content or "")
            for call in delta.tool_calls or ():
                self._tool_call(call)
            if choice.finish_reason:
                self.finish = _FINISHES.get(choice.finish_reason, "stop")
        return self._deltas.take()

    def answer(self) -> Answer:
        """Return what was said so far."""
        return self._deltas.answer()

    def _tool_call(self, call: Any) -> None:
        index, function = call.index or 0, call.function
        if index != self._call:
            if index in self._begun:
                raise ProtocolError(
                    "the provider mixes the arguments of parallel tool calls", status=502, code="provider"
                )
            self._begun.add(index)
            self._call = index
            self._deltas.call(ToolCall(call.id or f"call_{len(self._begun)}", function.name or ""))
        self._deltas.text(Part.ARGUMENTS, function.arguments or "")


class ProviderRefusal(ProtocolError):
    """A hosted model's error. Its `code` is the provider's own: one of any number."""


class Provider:
    """Asks one hosted model.

    Args:
        model: litellm's name, for example `openai/gpt-4o-mini`.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    async def ask(self, messages: list[dict[str, Any]], asked: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the chunks of a streamed answer. One request, no retries: the agent's own SDK decides on those.

        Raises:
            ProtocolError: the provider refused, broke off or cannot be reached; it carries the provider's status.
        """
        litellm = await asyncio.to_thread(load_litellm)
        stream: Any = None
        try:
            stream = await litellm.acompletion(
                model=self.model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                num_retries=0,
                max_retries=0,
                **asked,
            )
            async for chunk in stream:
                yield chunk
        except Exception as error:  # boundary: every provider has errors of its own
            raise provider_error(self.model, error, begun=stream is not None) from None
        finally:
            if stream is not None and hasattr(stream, "aclose"):
                await stream.aclose()

    async def whole(self, chunks: list[Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a finished answer as litellm puts it together, with `usage` and `cost` (US dollars; None: unknown).

        Raises:
            ProtocolError: what the provider sent is no whole answer.
        """
        litellm = await asyncio.to_thread(load_litellm)
        try:
            return await asyncio.to_thread(_whole, litellm, self.model, chunks, messages)
        except Exception as error:  # boundary: litellm raises whatever it likes on what it does not know
            raise provider_error(self.model, error, begun=True) from None

    async def count(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        """Return about how many tokens a prompt has, by the tokenizer that litellm takes for the model."""
        litellm = await asyncio.to_thread(load_litellm)
        counted = await asyncio.to_thread(
            litellm.token_counter, model=self.model, messages=messages, tools=list(tools) or None
        )
        return int(counted)


def provider_error(model: str, error: Exception, *, begun: bool = False) -> ProtocolError:
    """Return an error of litellm as the agent may see it: the provider's status, no key of the service in its text.

    502 where the provider gave none: it cannot be reached, or broke off.

    Args:
        model: that was asked.
        error: litellm's.
        begun: whether the provider had begun to answer, with a status of success.
    """
    if isinstance(error, ProtocolError):
        return error
    given = getattr(error, "status_code", None)
    status = given if isinstance(given, int) and 400 <= given < 600 else 502
    if (begun and status >= 500) or _unreached(error):
        status = 502
    code = getattr(error, "code", None)
    code = code if isinstance(code, str) and not code.isdigit() else PROVIDER_ERROR
    retryable = status in _RETRYABLE or status >= 500
    text = without_secrets(str(error), os.environ)
    what = f"{model} broke off in the middle of its answer" if begun and status == 502 else model
    return ProviderRefusal(f"{what}: {text}", status=status, code=code, retryable=retryable)


def _unreached(error: BaseException) -> bool:
    """Return whether a connection that could not be made, or broke, is behind an error. litellm calls that 500."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        if isinstance(following, _LOST):
            return True
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without the values of variables whose names say that they are secret."""
    for name, value in environment.items():
        if len(value) >= 8 and name.upper().endswith(_SECRETS):
            text = text.replace(value, f"[{name}]")
    return text


def _whole(litellm: Any, model: str, chunks: list[Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    answer: dict[str, Any] = built.model_dump(mode="json", exclude_none=True)
    try:
        answer["cost"] = float(litellm.completion_cost(built, model=model))
    except Exception:  # boundary: a model that litellm has no price for is no failure of the call
        answer["cost"] = None
    return answer


def _wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _tool_choice(request: ModelRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if request.tool_choice is ToolChoice.NAMED:
        asked["tool_choice"] = {"type": "function", "function": {"name": request.forced_tool}}
    elif request.tool_choice is not ToolChoice.AUTO:
        asked["tool_choice"] = str(request.tool_choice)
    if not request.parallel_tool_calls:
        asked["parallel_tool_calls"] = False
    return asked


def _format(structured: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(structured.get("json"), dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": structured["json"]}}
    if structured.get("json_object"):
        return {"type": "json_object"}
    raise _unknown("structured_outputs")


def _unknown(name: str) -> ProtocolError:
    return ProtocolError(f"{name} is not offered for a hosted model", code="invalid_value", param=name)
