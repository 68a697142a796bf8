"""What `benchmarks/workspace.py` measures, and with what."""
