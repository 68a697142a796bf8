"""Fixtures of the whole suite; each lives in a module of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["demo_kit", "docker_engine"]
