"""The harness: tasks, sessions, workspaces and the recording proxy. Light: no torch."""
