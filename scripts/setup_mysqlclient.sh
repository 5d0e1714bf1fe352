#!/usr/bin/env bash
# setup_mysqlclient.sh: the other driver for MySQL, so that it is tested, too. It must be compiled, which is not possible
# everywhere: where it is not, this says so, and the tests use PyMySQL alone.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/apt.sh

python=.venv/bin/python
"$python" -c 'import MySQLdb' 2>/dev/null && exit 0

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v pkg-config >/dev/null || missing+=(pkg-config)
pkg-config --exists mysqlclient 2>/dev/null || pkg-config --exists libmariadb 2>/dev/null || missing+=(libmariadb-dev)
# Debian's interpreters have their headers in a package of their own; others bring them.
if [ ! -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then
    missing+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
without() {
    say "mysqlclient $1: MySQL is tested with PyMySQL alone"
    exit 0
}
if [ ${#missing[@]} -gt 0 ]; then
    can_install || without "is not here, and to compile it Debian's ${missing[*]} are missing"
    say "installing Debian's ${missing[*]}, to compile mysqlclient (once)…"
    apt_install "${missing[@]}" || without "cannot be compiled without Debian's ${missing[*]}; apt's words are above"
fi
say "compiling mysqlclient (once, about 10 s)…"
if ! "$python" -m pip install -q --disable-pip-version-check --no-input 'mysqlclient>=2.2' >"$log" 2>&1; then
    cat "$log" >&2
    without "could not be compiled; pip's words are above"
fi
