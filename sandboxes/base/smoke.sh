#!/bin/sh
# Smoke test of the base sandbox: what gyre and its tasks rely on is there. Prints `ok` and exits 0.
set -eu
for tool in awk base64 cat chmod cp cut dd find grep head ls mkdir mkfifo mv printf rm sed setsid sleep sort stat tail tar tr uniq wc; do
  command -v "$tool" >/dev/null || { echo "$tool is missing"; exit 1; }
done
[ "$(id -u)" = 1000 ] || { echo "runs as $(id -u), not 1000"; exit 1; }
echo hello >/workspace/smoke && [ "$(cat /workspace/smoke)" = hello ] && rm /workspace/smoke
touch /tmp/smoke && rm /tmp/smoke
[ ! -w /etc ] || { echo "/etc is writable"; exit 1; }
echo ok
