#!/usr/bin/env bash
# Finds a Python that can carry the project and hands over to setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v "${CXX:-g++}" >/dev/null; then
  echo "No C++ compiler: install one (apt-get install g++) or set CXX." >&2
  exit 1
fi

for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
  if [[ -n "$python" ]] &&
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    exec "$python" scripts/setup.py "$@"
  fi
done
echo "No Python 3.10 or later found: install one (apt-get install python3) or set PYTHON." >&2
exit 1
