"""Scoring: what a run left behind, evaluated however it ended, so that no reward can be forged and no failure counts as 0.

Order::

    prepare                      at the start: scrub git's future history, seal what steers evaluations
    the agent's processes die    proven dead
    separate (default)           the image's programs are put back -> snapshot -> a fresh container, as another user ->
                                 what steers the evaluation is put back -> tests copied in -> links that lead
                                 into them are taken away -> run -> reward
    shared                       places of reward and tests emptied -> tests copied in -> links that lead into them are
                                 taken away -> run -> reward

`Task.verifier_mode` decides: `separate` costs a snapshot and a container per run (about a second), `shared` some milliseconds, in the
workspace that the agent had. Shared is for many short runs in recycled workspaces (their root is read-only and their agent is
an unprivileged user); it keeps out stale reward files, leftover processes and planted tests, and what the task names as
`protected`. What it does not keep out is code that the agent left where programs load it by themselves (a `conftest.py` where tests run
pytest in the working directory, a startup file of its own user): use it where tests load nothing of that kind.

In neither mode can the work product be kept from what tests hand to it: tests that import it run its code with their rights.
"""

from __future__ import annotations

from gyre_sdk.harness.scoring.attempts import RETRIES, evaluate, score, score_snapshot, score_with_retries
from gyre_sdk.harness.scoring.begin import prepare
from gyre_sdk.harness.scoring.history import scrub_history
from gyre_sdk.harness.scoring.policy import POLICY, Outcome, Retry, Rule, outcome, stands
from gyre_sdk.harness.scoring.reward import parse_reward
from gyre_sdk.harness.scoring.run import RunScoring, reason, retried_start
from gyre_sdk.harness.scoring.watch import Seal

__all__ = [
    "POLICY",
    "RETRIES",
    "Outcome",
    "Retry",
    "Rule",
    "RunScoring",
    "Seal",
    "evaluate",
    "outcome",
    "parse_reward",
    "prepare",
    "reason",
    "retried_start",
    "score",
    "score_snapshot",
    "score_with_retries",
    "scrub_history",
    "stands",
]
