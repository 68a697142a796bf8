#!/bin/sh
# Smoke test of the python sandbox. Prints `ok` and exits 0.
set -eu
[ "$(id -u)" = 1000 ] || { echo "runs as $(id -u), not 1000"; exit 1; }
for tool in bash curl git patch pip3 ps python python3; do
  command -v "$tool" >/dev/null || { echo "$tool is missing"; exit 1; }
done
[ -z "$(dpkg --audit)" ] || { echo "packages are not configured: $(dpkg --audit)"; exit 1; }
[ -s /etc/ssl/certs/ca-certificates.crt ] || { echo "no certificates"; exit 1; }
python3 -c 'import ctypes, lzma, sqlite3, ssl, zoneinfo; assert ssl.create_default_context().cert_store_stats()["x509_ca"] > 50'
place=$(mktemp -d)
python3 -m venv --without-pip "$place/venv" && "$place/venv/bin/python" -c 'import sys; assert sys.prefix != sys.base_prefix'
git init -q "$place/repository" && git -C "$place/repository" status >/dev/null
pip3 --version >/dev/null
rm -r "$place"
[ ! -w /etc ] || { echo "/etc is writable"; exit 1; }
echo ok
