"""From a model folder to its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.answers import format_of
from gyre_sdk.harness.proxy.render.chat_template import ChatTemplate
from gyre_sdk.harness.proxy.render.difference import Difference
from gyre_sdk.harness.proxy.render.families import likely_families, make_family, writes_alike
from gyre_sdk.harness.proxy.render.formats import guess_format
from gyre_sdk.harness.proxy.render.jinja import compile_template
from gyre_sdk.harness.proxy.render.template import Template
from gyre_sdk.harness.proxy.render.tokenizer import Codec, TokenizerAdapter

AUTO, OWN = "auto", "template"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_template(
    model: Path,
    renderer: str = AUTO,
    options: Mapping[str, Any] | None = None,
    context: int | None = None,
    today: datetime | None = None,
) -> Template:
    """Return the template of a model folder.

    Args:
        model: folder with `tokenizer.json`, and `config.json`, `generation_config.json`, `tokenizer_config.json` and
            `chat_template.jinja` where there are any.
        renderer: family in the `renderers` package; `template` for the model's own chat template; `auto` for the
            family that writes what the model's own chat template writes, else that template.
        options: of the family's configuration, or variables of the template, for example `enable_thinking`;
            `thinking_retention = "all"` keeps old thinking in prompts.
        context: overrides the model's own limit.
        today: what a chat template that tells the date is told; None takes the time of loading.

    Raises:
        SettingsError: the folder, the family or an option is wrong.
    """
    folder = _Folder(model)
    given = dict(options or {})
    limit = context or folder.config.get("max_position_embeddings")
    limit = limit if isinstance(limit, int) else None
    if renderer == OWN:
        return folder.own(given, today, limit)
    if renderer != AUTO:
        return folder.family(renderer, given, limit)
    return _choose(folder, given, today, limit)


def _choose(folder: _Folder, options: dict[str, Any], today: datetime | None, limit: int | None) -> Template:
    own = folder.own(options, today, limit) if folder.sources else None
    refused: SettingsError | None = None
    sources = list(folder.sources.values())
    for name in likely_families(folder.model, folder.config, folder.tokenizer_config, sources):
        try:
            family = folder.family(name, options, limit)
        except SettingsError as error:
            refused = refused or error
            continue
        if own is None or writes_alike(family.renderer, family.tokenizer.decode, own.renderer):
            return family
    if own is not None:
        return own
    raise refused or SettingsError(
        f"model {folder.model} has no chat template and no known type; name its `renderer` (`qwen3`, `llama-3`, ...)"
    )


class _Folder:
    """What a model folder says about its tokenizer."""

    def __init__(self, model: Path) -> None:
        self.model = model
        file = model / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"model {model} has no tokenizer.json; give a Hugging Face model folder")
        try:
            self._data = file.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(self._data)
        except Exception as error:  # boundary: tokenizers raises bare Exception
            raise SettingsError(f"{file} cannot be read: {error}") from error
        self.config = _json(model / "config.json")
        self.tokenizer_config = _json(model / "tokenizer_config.json")
        self.named = self._named()
        self.sources = self._sources()
        """Chat templates by name; empty where the model has none."""
        self._stops = self._stop_ids()

    def family(self, name: str, options: Mapping[str, Any], limit: int | None) -> Template:
        """Return the template over a family of the `renderers` package."""
        adapter = self._adapter()
        made = make_family(adapter, name, options)
        ids = tuple(dict.fromkeys([*made.get_stop_token_ids(), *self._stops]))
        retains = options.get("thinking_retention") == "all"
        return Template(made, adapter, ids, limit, retains, format_of(name, adapter))

    def own(self, options: Mapping[str, Any], today: datetime | None, limit: int | None) -> Template:
        """Return the template over the model's own chat template."""
        if not self.sources:
            raise SettingsError(f"model {self.model} has no chat template; name its `renderer`")
        variables = {key: value for key, value in options.items() if key != "thinking_retention"}
        codec = Codec(self._data, self.sources.values(), self.named.values())
        form = guess_format(list(self.sources.values()))
        day = today or datetime.now()
        default = self.sources.get("default") or next(iter(self.sources.values()))
        plain = compile_template(default, day)
        tooled = compile_template(self.sources["tool_use"], day) if "tool_use" in self.sources else plain
        stops = tuple(self._stops)
        made = ChatTemplate(codec, plain, tooled, {**self.named, **variables}, form, stops)
        texts = {token: text for token in stops if (text := self._tokenizer.id_to_token(token))}
        retains = options.get("thinking_retention") == "all"
        live = made.live_format()
        return Template(made, self._adapter(), stops, limit, retains, live, Difference(made, texts, retains))

    def _adapter(self) -> TokenizerAdapter:
        return TokenizerAdapter(self._tokenizer, str(self.model), self._stops[0] if self._stops else None)

    def _named(self) -> dict[str, str]:
        """Return the texts of the named tokens, as templates are told them."""
        found: dict[str, str] = {}
        for name in _NAMED:
            for source in (self.tokenizer_config, _json(self.model / "special_tokens_map.json")):
                token = source.get(name)
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str) and name not in found:
                    found[name] = text
        return found

    def _sources(self) -> dict[str, str]:
        file = self.model / "chat_template.jinja"
        given = self.tokenizer_config.get("chat_template") or _json(self.model / "chat_template.json").get(
            "chat_template"
        )
        found: dict[str, str] = {}
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, list):
            found = {item["name"]: item["template"] for item in given if isinstance(item, dict)}
        if file.is_file():
            found["default"] = file.read_text(encoding="utf-8")
        for more in sorted((self.model / "additional_chat_templates").glob("*.jinja")):
            found[more.stem] = more.read_text(encoding="utf-8")
        return found

    def _stop_ids(self) -> list[int]:
        found: list[int] = []
        for source in (_json(self.model / "generation_config.json"), self.config):
            given = source.get("eos_token_id")
            found += [given] if isinstance(given, int) else given if isinstance(given, list) else []
            if found:
                break
        named = self._tokenizer.token_to_id(self.named["eos_token"]) if "eos_token" in self.named else None
        return list(dict.fromkeys([*found, *([named] if named is not None else [])]))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


__all__ = ["load_template"]
