#!/usr/bin/env bash
# Usage: find_python.sh MAJOR.MINOR...
# Prints the first interpreter of those versions that can make a virtual environment; exits 1 silently if none can.
set -u

# A version manager's shim can be on PATH and still fail, and distributions ship pythons without ensurepip: run it.
# What it prints is the interpreter itself, which stays the same when a shim's choice changes.
probe='import ensurepip, sys, venv; print(sys.executable) if "%d.%d" % sys.version_info[:2] == sys.argv[1] else sys.exit(1)'

for version in "$@"; do
    while IFS= read -r candidate; do
        [ -x "$candidate" ] && "$candidate" -c "$probe" "$version" 2>/dev/null && exit 0
    done < <(
        type -ap "python$version" python3
        ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$version".*/bin/python 2>/dev/null
    )
done
exit 1
