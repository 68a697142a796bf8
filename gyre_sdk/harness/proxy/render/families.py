"""The families of the `renderers` package: which one a model belongs to, and bridges that cost their new tokens only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.render.tokenizer import TokenizerAdapter

_BY_TYPE: dict[str, tuple[str, ...]] = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_next": ("qwen3.5",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "gpt_oss": ("gpt-oss",),
    "llama": ("llama-3",),
    "minimax": ("minimax-m2",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "kimi_k2": ("kimi-k2",),
}
"""Families that a `model_type` of `config.json` may belong to."""

_BY_LOOK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("<|im_start|>", "<tool_call>", "<function="), ("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "nemotron-3")),
    (("<|im_start|>", "<tool_call>"), ("qwen3",)),
    (("<｜User｜>", "<｜tool▁calls▁begin｜>"), ("deepseek-v3", "deepseek-r1")),
    (("<|observation|>", "<tool_call>"), ("glm-4.5", "glm-5")),
    (("<|start_header_id|>", "<|eot_id|>"), ("llama-3",)),
    (("<|channel|>", "<|start|>"), ("gpt-oss",)),
)
"""Families that a chat template which holds some texts may belong to; the first that fits is taken."""

_TAIL = 64
"""Least tokens of a prompt that a family is shown to bridge from."""
_HUB = re.compile(r"models--([^/]+?)--([^/]+)")

_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
_TOOL = {
    "type": "function",
    "function": {"name": "ls", "description": "List", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "call_000", "type": "function", "function": {"name": "ls", "arguments": '{"a": "b"}'}}
_WORK: list[dict[str, Any]] = [
    *_TALK[:2],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "four", "tool_call_id": "call_000"},
]


def make_family(adapter: TokenizerAdapter, family: str, options: Mapping[str, Any]) -> Any:
    """Return the renderer of a family.

    Raises:
        SettingsError: there is no such family, it does not fit the tokenizer, or an option is wrong.
    """
    import pydantic
    import renderers  # imports the openai package: half a second that `import gyre_sdk` must not pay
    from renderers.base import create_renderer

    kind = pydantic.TypeAdapter(renderers.RendererConfig)
    try:
        return create_renderer(adapter, kind.validate_python({"name": family, **options}))
    except pydantic.ValidationError as error:
        problems = "; ".join(": ".join([*map(str, item["loc"]), item["msg"]]) for item in error.errors())
        raise SettingsError(f"renderer {family} with options {dict(options)}: {problems}") from error
    except (AssertionError, ValueError, TypeError, ImportError) as error:
        raise SettingsError(
            f"renderer {family} does not fit the tokenizer of {adapter.name_or_path}: {error}"
        ) from error


def likely_families(
    model: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], sources: Sequence[str]
) -> tuple[str, ...]:
    """Return the families that a model folder may belong to by its name, type and template, the likeliest first."""
    from renderers.base import MODEL_RENDERER_MAP

    path = str(model)
    hub = _HUB.search(path)
    names = [
        config.get("_name_or_path"),
        tokenizer_config.get("name_or_path"),
        f"{hub[1]}/{hub[2]}" if hub else "/".join(model.parts[-2:]),
    ]
    named = [MODEL_RENDERER_MAP[name] for name in names if isinstance(name, str) and name in MODEL_RENDERER_MAP]
    typed = _BY_TYPE.get(str(config.get("model_type") or ""), ())
    source = "\n".join(sources)
    looks = next((families for signs, families in _BY_LOOK if all(sign in source for sign in signs)), ())
    return tuple(dict.fromkeys([*named, *typed, *looks]))


def writes_alike(family: Any, decode: Callable[[list[int]], str], own: Any) -> bool:
    """Return whether a family's renderer writes a talk, and work with tools, as the model's own chat template does."""
    for messages, tools in ((_TALK, None), (_TALK[1:], None), (_WORK, [_TOOL])):
        try:
            texts = [
                decode(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
                for renderer in (family, own)
            ]
        except Exception:  # boundary: third-party templates raise whatever they like; such a family does not fit
            return False
        if texts[0] != texts[1]:
            return False
    return True


def family_bridge(
    family: Any,
    stop_ids: Sequence[int],
    whole: Ids,
    prompt_len: int,
    new: Sequence[Mapping[str, Any]],
    tools: list[Mapping[str, Any]] | None,
) -> list[int] | None:
    """Return the ids that a family's renderer puts behind a recorded turn, or None where it does not bridge.

    Families look at the end of the prompt only, back to the last token that ended an answer; they get no more.
    """
    start = _tail_start(whole[:prompt_len], stop_ids)
    known = whole[start:].tolist()
    cut = prompt_len - start
    bridged = family.bridge_to_next_turn(known[:cut], known[cut:], list(new), tools=tools)
    if bridged is None:
        return None
    ids = list(bridged.token_ids)
    return ids[len(known) :] if ids[: len(known)] == known else None


def _tail_start(prompt: Ids, stop_ids: Sequence[int]) -> int:
    size = _TAIL
    if size < len(prompt):
        for back, token in enumerate(reversed(prompt[-size:].tolist()), 1):
            if token in stop_ids:
                return len(prompt) - max(back, _TAIL)
        size *= 4
    while size < len(prompt):
        end = prompt[-size:]
        found = max((int(places[-1]) for stop in stop_ids if len(places := np.flatnonzero(end == stop))), default=-1)
        if found >= 0:
            return min(len(prompt) - size + found, len(prompt) - _TAIL)
        size *= 4
    return 0


__all__ = ["family_bridge", "likely_families", "make_family", "writes_alike"]
