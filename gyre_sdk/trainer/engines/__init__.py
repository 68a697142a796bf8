"""Inference engines that gyre drives: the embedded one and vLLM."""
