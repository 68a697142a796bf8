"""Finds a classifier by name: a preset of ours, or the user's own by import path."""

from __future__ import annotations

import importlib

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.lanes import Classifier
from gyre_sdk.harness.proxy.lanes.presets import CLAUDE_CODE, CODEX, GENERIC, MINI_SWE_AGENT, OPENAI_AGENTS, PRESETS
from gyre_sdk.harness.proxy.lanes.rules import RuleClassifier

AUTO = RuleClassifier(PRESETS, GENERIC)
"""Recognises the program by each request."""

_NAMED: dict[str, Classifier] = {
    "auto": AUTO,
    **{preset.name: RuleClassifier((), preset) for preset in (*PRESETS, GENERIC)},
}


def load_classifier(name: str) -> Classifier:
    """Return the classifier of a preset's name, or of an import path `module:attribute`.

    The attribute is a `Classifier`, or what makes one when called without arguments, such as its class.

    Raises:
        SettingsError: there is no such preset, module or attribute, or it gives no classifier.
    """
    if name in _NAMED:
        return _NAMED[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        known = ", ".join(sorted(_NAMED))
        raise SettingsError(f"classifier {name!r} is unknown; use one of {known}, or an import path module:attribute")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise SettingsError(f"classifier {name!r}: module {module} cannot be imported: {error}") from error
    except AttributeError:
        raise SettingsError(f"classifier {name!r}: module {module} has no {attribute}") from None
    made = found() if callable(found) and not isinstance(found, Classifier) else found
    if not isinstance(made, Classifier):
        raise SettingsError(
            f"classifier {name!r} is a {type(made).__name__}; subclass gyre_sdk.harness.proxy.lanes.Classifier"
        )
    return made


__all__ = ["AUTO", "CLAUDE_CODE", "CODEX", "GENERIC", "MINI_SWE_AGENT", "OPENAI_AGENTS", "load_classifier"]
