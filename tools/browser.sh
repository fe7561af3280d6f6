#!/usr/bin/env bash
# A browser for the tests of the console, from Debian's own packages, where this machine lets us install one. Says what it
# did; fails only where there is none afterwards.
set -euo pipefail
found() { command -v chromium chromium-browser google-chrome google-chrome-stable | head -n 1; }

if [ -z "$(found)" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || true
fi
if [ -z "$(found)" ]; then
    echo "browser: there is no chromium here, and none could be installed: tests of the console's page are skipped" >&2
    exit 1
fi
echo "browser: $(found)" >&2
