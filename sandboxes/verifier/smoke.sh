#!/bin/sh
# Smoke test of the verifier sandbox. Prints `ok` and exits 0.
set -eu
place=$(mktemp -d)
cd "$place"
printf 'import pytest\n\n\n@pytest.mark.timeout(20)\ndef test_sum():\n    assert 1 + 1 == 2\n' >test_it.py
printf 'def test_wrong():\n    assert 1 + 1 == 3\n' >test_wrong.py
python3 -m pytest -q -p no:cacheprovider test_it.py >out || { cat out; exit 1; }
if python3 -m pytest -q -p no:cacheprovider test_wrong.py >out; then cat out; exit 1; fi
[ "$(echo '{"a": [1, 2]}' | jq '.a | add')" = 3 ]
python3 -c 'import yaml'
[ -z "$(dpkg --audit)" ] || { echo "packages are not configured: $(dpkg --audit)"; exit 1; }
cd / && rm -r "$place"
echo ok
