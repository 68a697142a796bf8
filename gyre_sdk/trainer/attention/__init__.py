"""Executors: how the log-probs of a batch's targets are computed. All are exact; they differ in cost.

`flat` runs every row by itself and is the reference.
"""
