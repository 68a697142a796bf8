#!/bin/sh
# Smoke test of the node sandbox. Prints `ok` and exits 0.
set -eu
place=$(mktemp -d)
cd "$place"
[ "$(node -e 'console.log([1, 2, 3].reduce((a, b) => a + b))')" = 6 ]
node -e 'require("crypto").createHash("sha256"); require("zlib").gzipSync("x"); new Intl.NumberFormat("de").format(1.5)'
mkdir -p package && printf '{"name": "it", "version": "1.0.0", "main": "it.js"}' >package/package.json
echo 'module.exports = 42' >package/it.js
echo '{"name": "user", "version": "1.0.0"}' >package.json
npm install --offline --no-audit --no-fund --silent ./package >out 2>&1 || { cat out; exit 1; }
[ "$(node -p 'require("it")')" = 42 ]
[ -z "$(dpkg --audit)" ] || { echo "packages are not configured: $(dpkg --audit)"; exit 1; }
cd / && rm -r "$place"
echo ok
