"""Parts of the proxy's benchmark; `python benchmarks/proxy.py` runs it."""
