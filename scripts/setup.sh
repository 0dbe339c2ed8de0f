#!/usr/bin/env bash
# Finds a Python that can carry the project and hands over to setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v "${CXX:-g++}" >/dev/null; then
  echo "No C++ compiler: install one (apt-get install g++) or set CXX." >&2
  exit 1
fi

good() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if [[ -n "${PYTHON:-}" ]]; then
  if good "$PYTHON"; then exec "$PYTHON" scripts/setup.py "$@"; fi
  echo "PYTHON=$PYTHON is no Python 3.10 or later that runs here: name another, or none." >&2
  exit 1
fi
for python in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
  if good "$python"; then exec "$python" scripts/setup.py "$@"; fi
done
echo "No Python 3.10 or later found: install one (apt-get install python3) or set PYTHON." >&2
exit 1
