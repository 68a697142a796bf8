"""The parts of `benchmarks/tree.py`: histories, the clock of every system, and ours beside what is compared."""
