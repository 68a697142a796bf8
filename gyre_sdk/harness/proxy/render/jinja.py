"""Chat templates: jinja2 in the sandbox and with the extras that Hugging Face's chat templates are written for.

The extras are the ones of `transformers.utils.chat_template_utils`: `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `{% generation %}` blocks, loop controls. The date is passed in, so that a run's prompts do not change
at midnight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gyre_sdk.errors import SettingsError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_show", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def compile_template(source: str, today: datetime) -> Callable[..., str]:
    """Return a function that renders a chat template with keyword variables.

    Args:
        source: the template.
        today: what `strftime_now` tells.

    Raises:
        SettingsError: the template is not valid.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = today.strftime
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise SettingsError(f"the model's chat template is not valid: {error}") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
