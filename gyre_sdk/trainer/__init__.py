"""The trainer: rollouts, units, a TRL-based trainer, publication. Needs the extra `[train]`."""
