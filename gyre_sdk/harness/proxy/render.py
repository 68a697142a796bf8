"""Messages to tokens and back, through the `renderers` package over a model folder's own tokenizer.

Text never becomes a special token: `<|im_end|>` in a user's message or a tool's output is encoded as plain text.
Tokens of earlier turns are never made again from text: `bridge` keeps the ids that were sent and sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gyre_sdk.errors import RenderError, SettingsError
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ToolCall, ToolChoice

_SHORT, _SHORT_KEPT = 24, 4096


class TokenizerAdapter:
    """The part of a Hugging Face tokenizer that `renderers` calls, over `tokenizers.Tokenizer`."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._short: dict[str, tuple[int, ...]] = {}
        self.name_or_path = name_or_path
        self.eos_token_id = eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Return the ids of plain text. Short texts are remembered: templates repeat the same few."""
        if len(text) <= _SHORT and not add_special_tokens:
            found = self._short.get(text)
            if found is None:
                if len(self._short) >= _SHORT_KEPT:
                    self._short.clear()
                found = self._short[text] = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
            return list(found)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each; None for one that the vocabulary does not have."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


@dataclass(frozen=True, slots=True)
class Template:
    """How one model writes conversations."""

    renderer: Any
    """A renderer of the `renderers` package, or anything with the same four methods."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int | None = None
    """Longest prompt + answer that the model can attend to, in tokens; None when unknown."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a whole conversation and the opening of the model's turn.

        Raises:
            RenderError: the template cannot show these messages.
        """
        try:
            ids: list[int] = self.renderer.render_ids(
                [_wire(message) for message in messages], tools=list(tools) or None, add_generation_prompt=True
            )
        except Exception as error:  # boundary: third-party templates raise whatever they like
            raise RenderError(f"the model's template cannot show these messages: {error}") from error
        if not ids:
            raise RenderError("the messages render to no tokens")
        return ids

    def bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int] | None:
        """Return the ids that continue a recorded turn with new messages, or None where the renderer cannot.

        Raises:
            RenderError: the template cannot show these messages.
        """
        try:
            bridged = self.renderer.bridge_to_next_turn(
                prompt, sampled, [_wire(message) for message in new], tools=list(tools) or None
            )
        except Exception as error:  # boundary: third-party templates raise whatever they like
            raise RenderError(f"the model's template cannot show these messages: {error}") from error
        return None if bridged is None else list(bridged.token_ids)

    def parse(
        self,
        ids: Sequence[int],
        prompt: list[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        name: str = "",
        stop: str | None = None,
        final: bool = True,
        choice: ToolChoice = ToolChoice.AUTO,
        parallel: bool = True,
    ) -> Answer:
        """Return what sampled ids say.

        Args:
            ids: sampled ids so far.
            prompt: ids of the prompt; its end tells whether thinking was opened there.
            tools: as in the request.
            name: makes the ids of tool calls: the same name gives the same ids again.
            stop: the stop string that ended sampling; the text ends before it.
            final: False for an answer that is still being sampled: unfinished tool calls are left out.
            choice: with `NONE`, tool calls stay text.
            parallel: False keeps the first tool call only.

        Raises:
            RenderError: the parser failed.
        """
        try:
            parsed = self.renderer.parse_response(list(ids), tools=list(tools) or None, prompt_ids=prompt)
            good: list[Any] = []
            bad: list[Any] = []
            for call in parsed.tool_calls or ():
                (good if str(call.status) == "ok" and choice is ToolChoice.AUTO else bad).append(call)
            texts = [self.tokenizer.decode(list(ids)[slice(*call.token_span)]) for call in bad] if final else []
        except Exception as error:  # boundary: third-party parsers raise whatever they like
            raise RenderError(f"the sampled tokens cannot be parsed: {error}") from error
        content = "\n".join(text for text in (parsed.content, *texts) if text)
        reasoning = (parsed.reasoning_content or "").strip()
        if stop and stop in content:
            content = content[: content.index(stop)]
        elif stop and stop in reasoning:
            reasoning = reasoning[: reasoning.index(stop)]
        calls = tuple(
            ToolCall(f"call_{name}{place}", call.name, _arguments(call))
            for place, call in enumerate(good if parallel else good[:1])
        )
        return Answer(content, reasoning, calls if final else ())

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self.tokenizer.decode(list(ids))
        return text


def load_template(
    model: Path, renderer: str = "qwen3", options: Mapping[str, Any] | None = None, context: int | None = None
) -> Template:
    """Return the template of a model folder.

    Args:
        model: folder with `tokenizer.json`, and `config.json` and `generation_config.json` where there are any.
        renderer: family in the `renderers` package.
        options: of the family's configuration, for example `enable_thinking`.
        context: overrides the model's own limit.

    Raises:
        SettingsError: the folder, the family or an option is wrong.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise SettingsError(f"model {model} has no tokenizer.json; give a Hugging Face model folder")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # boundary: tokenizers raises bare Exception
        raise SettingsError(f"{file} cannot be read: {error}") from error
    stops = _stop_ids(model, tokenizer)
    adapter = TokenizerAdapter(tokenizer, str(model), stops[0] if stops else None)
    made = _renderer(adapter, renderer, dict(options or {}))
    config = _json(model / "config.json")
    limit = context or config.get("max_position_embeddings")
    ids = tuple(dict.fromkeys([*made.get_stop_token_ids(), *stops]))
    return Template(made, adapter, ids, limit if isinstance(limit, int) else None)


def _renderer(adapter: TokenizerAdapter, family: str, options: dict[str, Any]) -> Any:
    import pydantic
    import renderers  # imports the openai package: half a second that `import gyre_sdk` must not pay
    from renderers.base import create_renderer

    kind = pydantic.TypeAdapter(renderers.RendererConfig)
    try:
        return create_renderer(adapter, kind.validate_python({"name": family, **options}))
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise SettingsError(f"renderer {family} with options {options}: {problems}") from error
    except (AssertionError, ValueError, TypeError, ImportError) as error:
        raise SettingsError(
            f"renderer {family} does not fit the tokenizer of {adapter.name_or_path}: {error}"
        ) from error


def _stop_ids(model: Path, tokenizer: Tokenizer) -> list[int]:
    generation = _json(model / "generation_config.json").get("eos_token_id")
    found = [generation] if isinstance(generation, int) else generation if isinstance(generation, list) else []
    token = _json(model / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    named = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return [*found, *([named] if named is not None and named not in found else [])]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


class _Call(msgspec.Struct):
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _arguments(call: Any) -> str:
    """Return a parsed call's arguments as the model wrote them, where its format is JSON; else as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    try:
        raw = bytes(msgspec.json.decode(call.raw.encode(), type=_Call).arguments).decode()
        if json.loads(raw) == call.arguments:
            return raw
    except (ValueError, msgspec.DecodeError, AttributeError):
        pass
    return json.dumps(call.arguments if call.arguments is not None else {}, ensure_ascii=False)


def _wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    return wire
