"""Module rules that no linter knows: size, names that say nothing, unmarked broad excepts. Run by `make check`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
VAGUE = {"utils.py", "common.py", "helpers.py", "misc.py"}
BROAD = re.compile(r"except\s*(:|\(?\s*(Exception|BaseException)\b)")


def problems() -> list[str]:
    """Return one line per broken rule."""
    found = []
    for path in sorted((ROOT / "gyre_sdk").rglob("*.py")):
        name = path.relative_to(ROOT)
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{name}: {len(lines)} lines, limit {MAX_LINES}; split it by responsibility")
        if path.name in VAGUE:
            found.append(f"{name}: the name says nothing")
        if not lines or not lines[0].startswith(('"""', 'r"""')):
            found.append(f"{name}: starts without a docstring")
        for number, line in enumerate(lines, 1):
            if BROAD.search(line) and "# boundary" not in line and not _reraises(lines, number):
                found.append(f"{name}:{number}: broad except that is not marked `# boundary`")
    return found


def _reraises(lines: list[str], number: int) -> bool:
    """Tell whether the handler that starts at a line ends in a bare `raise`."""
    indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    body = []
    for line in lines[number:]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        body.append(line.strip())
    return any(line == "raise" for line in body)


if __name__ == "__main__":
    broken = problems()
    print("\n".join(broken) or "module rules hold")
    sys.exit(1 if broken else 0)
