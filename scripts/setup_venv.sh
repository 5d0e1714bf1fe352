#!/usr/bin/env bash
# setup_venv.sh PYTHON EXTRAS: the virtual environment .venv, with dibs (editable) and these extras in it.
#
# A stamp in .venv says what was installed from what, so that a second run costs one checksum. It is taken away before
# anything changes and written after everything worked: a set-up that was interrupted starts again.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/apt.sh

python=$1
extras=$2
stamp=.venv/.dibs-$(printf %s "$extras" | tr ',' '-')
made_with=.venv/.dibs-python
wanted="$PWD $python $(cksum <pyproject.toml)"

if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

started=$SECONDS
say "setting up .venv for $extras (once, about 30 s)…"

# An environment made with another PYTHON, or whose interpreter has gone, is made again; one made by hand is kept.
clear=
if [ -e "$made_with" ] && [ "$(cat "$made_with")" != "$python" ]; then
    clear=--clear
elif [ -e .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    clear=--clear
fi

if [ -n "$clear" ] || [ ! -e .venv ]; then
    command -v "$python" >/dev/null ||
        stop "there is no '$python' here; install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "'$python' is $("$python" --version 2>&1); dibs needs Python 3.10 or newer: make PYTHON=/path/to/python3"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian ships the two in a package of their own, for its own interpreters only.
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        [ "$("$python" -c 'import sys; print(sys.base_prefix)')" = /usr ] ||
            stop "'$python' lacks the modules venv and ensurepip; install them for it, or name another Python with PYTHON=…"
        can_install || stop "Debian's package $package is missing, and installing it needs root or sudo without a password"
        say "installing Debian's $package…"
        apt_install "$package" || stop "Debian's package $package could not be installed; apt's words are above"
    fi
    # shellcheck disable=SC2086 # empty, or one option
    "$python" -m venv $clear .venv
    printf '%s\n' "$python" >"$made_with"
fi

rm -f "$stamp"
# -qq: warnings about an index that lacks a package are no news; errors are shown.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input -e ".[$extras]" ||
    stop "pip could not install dibs with its extras $extras; its words are above"
printf '%s\n' "$wanted" >"$stamp"
say "set up .venv in $((SECONDS - started)) s"
