#!/usr/bin/env bash
# setup_postgres.sh: PostgreSQL's server programs (initdb, postgres) and the pooler PgBouncer, for the private servers
# of tests and benchmarks.
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

have_pgbouncer() { [ -x /usr/sbin/pgbouncer ] || command -v pgbouncer >/dev/null; }

have_postgres && have_pgbouncer && exit 0
can_install ||
    stop "PostgreSQL's server programs (initdb, postgres) or pgbouncer are missing: install them, or run this as root or with sudo on Debian"

say "installing Debian's PostgreSQL server and PgBouncer (once, about 30 s)…"
drop_in=/etc/postgresql-common/createcluster.d/dibs-no-cluster.conf
policy=/usr/sbin/policy-rc.d
as_root mkdir -p "$(dirname "$drop_in")"
made_policy=
trap 'as_root rm -f "$drop_in" $made_policy' EXIT
printf '%s\n' "create_main_cluster = false" | as_root tee "$drop_in" >/dev/null
if [ ! -e "$policy" ]; then
    # Debian's way to install a service without starting it.
    made_policy=$policy
    printf '%s\n' '#!/bin/sh' 'exit 101' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
fi
have_postgres || apt_install postgresql || stop "Debian's package postgresql could not be installed; apt's words are above"
have_postgres || stop "the package postgresql was installed, but brought no initdb and postgres to /usr/lib/postgresql/*/bin"
have_pgbouncer || apt_install pgbouncer || stop "Debian's package pgbouncer could not be installed; apt's words are above"
