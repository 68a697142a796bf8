"""The model's templates at run time: one per history policy, and one more where a request turns thinking on or off."""

from __future__ import annotations

import logging
import threading

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.render import Template, load_template
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy, ProxySettings

log = logging.getLogger(__name__)


class Templates:
    """Loads and keeps templates. Safe to use from several threads.

    Args:
        settings: model folder, renderer and its options.
        given: takes the place of the model's own template under every policy.

    Raises:
        SettingsError: the model folder or the renderer is wrong.
    """

    def __init__(self, settings: ProxySettings, given: Template | None = None) -> None:
        self._settings = settings
        self._given = given
        self._made: dict[tuple[HistoryPolicy, bool | None], Template] = {}
        self._making = threading.Lock()
        if settings.model is not None or given is not None:
            for policy in HistoryPolicy:
                self.of(policy)

    @property
    def base(self) -> Template:
        """The template for what does not depend on the policy: text, limits, stop tokens."""
        return self.of(self._settings.history)

    def known(self, policy: HistoryPolicy, thinking: bool | None = None) -> Template | None:
        """Return a template if it is loaded."""
        return self._made.get((policy, thinking))

    def of(self, policy: HistoryPolicy, thinking: bool | None = None) -> Template:
        """Return the template of a policy, loading it where it is asked for the first time."""
        with self._making:
            found = self._made.get((policy, thinking))
            if found is None:
                found = self._made[(policy, thinking)] = self._given or self._load(policy, thinking)
            return found

    def _load(self, policy: HistoryPolicy, thinking: bool | None) -> Template:
        settings = self._settings
        if settings.model is None:
            raise SettingsError("this service has no policy: its settings name no model folder")
        options = dict(settings.renderer_options)
        if policy is HistoryPolicy.BRIDGE:
            options = {"thinking_retention": "all", **options}
        if thinking is None or options.get("enable_thinking") is thinking:
            return load_template(settings.model, settings.renderer, options, settings.context)
        try:
            return load_template(
                settings.model, settings.renderer, {**options, "enable_thinking": thinking}, settings.context
            )
        except SettingsError:
            log.warning(
                "renderer %s cannot turn thinking on or off; requests that ask for it get its default",
                settings.renderer,
            )
            return self._made[(policy, None)]
