"""`gyre fsck`: check that a store keeps what it promises."""

from __future__ import annotations

import dataclasses

import typer

from gyre_sdk.cli.store import AsJson, Store, json_line, open_store
from gyre_sdk.journal.audit import Level
from gyre_sdk.view.escape import counted, visible


def fsck(store: Store, as_json: AsJson = False) -> None:
    """Check a store: every delivered call is there with exact ids, every path adds up. Exit status 1 if not."""
    errors = calls = 0
    with open_store(store) as journal:
        for finding in journal.audit():
            errors += finding.level is Level.ERROR
            if as_json:
                json_line(dataclasses.asdict(finding))
            else:
                text = f"{finding.level} {finding.subject}: {finding.what}; {finding.remedy}"
                typer.echo(visible(" ".join(text.split()), 400))
        if not errors:
            calls = len(journal.call_summaries())
    verdict = counted(errors, "error") if errors else f"no errors in {counted(calls, 'call')}"
    typer.echo(f"{journal.path}: {verdict}", err=True)
    if errors:
        raise typer.Exit(1)
