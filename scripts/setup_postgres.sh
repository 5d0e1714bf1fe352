#!/usr/bin/env bash
# setup_postgres.sh: PostgreSQL's server programs (initdb, postgres), for the private servers of tests and benchmarks.
#
# Programs that are there already are used, wherever tests/servers.py would find them. Otherwise Debian's package is
# installed, without the cluster that it would create and start: nothing here needs a server that runs all the time.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/apt.sh

# The same places in the same order as find_postgres() in tests/servers.py.
have_postgres() {
    local found folder
    found=$(command -v initdb 2>/dev/null || true)
    for folder in ${found:+"$(dirname "$(readlink -f "$found")")"} /usr/lib/postgresql/*/bin \
        "$(pg_config --bindir 2>/dev/null || true)"; do
        [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ] && return 0
    done
    return 1
}

have_postgres && exit 0
can_install ||
    stop "PostgreSQL's server programs (initdb, postgres) are missing: install them, or run this as root or with sudo on Debian"

say "installing Debian's PostgreSQL server (once, about 30 s)…"
drop_in=/etc/postgresql-common/createcluster.d/dibs-no-cluster.conf
as_root mkdir -p "$(dirname "$drop_in")"
trap 'as_root rm -f "$drop_in"' EXIT
printf '%s\n' "create_main_cluster = false" | as_root tee "$drop_in" >/dev/null
apt_install postgresql || stop "Debian's package postgresql could not be installed; apt's words are above"
have_postgres || stop "the package postgresql was installed, but brought no initdb and postgres to /usr/lib/postgresql/*/bin"
