"""The report of a store: facts -> figures -> one HTML page. Folds only: nothing here reads a store or decides anything."""

from gyre_sdk.view.report.document import document
from gyre_sdk.view.report.facts import CallFact, Facts, Spent, StepFact
from gyre_sdk.view.report.figures import Figures, figures

__all__ = ["CallFact", "Facts", "Figures", "Spent", "StepFact", "document", "figures"]
