"""Cells: GPUs that serve or train. `state` is the table of what a cell may become, `plan` decides who moves; both are pure."""
