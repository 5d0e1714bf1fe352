#!/usr/bin/env bash
# setup_servers.sh: the server programs for the private servers of tests and benchmarks.
#
# Programs that are there already are used, wherever tests/servers/ would find them. Otherwise Debian's packages are
# installed, without starting a service: nothing here needs a server that runs all the time.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/apt.sh

# The same places in the same order as find_postgres() in tests/servers/postgres.py.
have_postgresql() {
    local found folder
    found=$(command -v initdb 2>/dev/null || true)
    for folder in ${found:+"$(dirname "$(readlink -f "$found")")"} /usr/lib/postgresql/*/bin \
        "$(pg_config --bindir 2>/dev/null || true)"; do
        [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ] && return 0
    done
    return 1
}

# One of these programs is on the PATH or where Debian puts servers.
have_program() {
    local name
    for name in "$@"; do
        if command -v "$name" >/dev/null || [ -x "/usr/sbin/$name" ]; then
            return 0
        fi
    done
    return 1
}

# have PACKAGE: is what this package of Debian would bring here already?
have() {
    case $1 in
    postgresql) have_postgresql ;;
    pgbouncer) have_program pgbouncer ;;
    mariadb-server) have_program mariadbd mysqld ;;
    redis-server) have_program redis-server valkey-server ;;
    redis-sentinel) have_program redis-sentinel valkey-sentinel ;;
    memcached) have_program memcached ;;
    etcd-server) have_program etcd ;;
    zookeeper) [ -e /usr/share/java/zookeeper.jar ] && have_program java ;;
    libfaketime) compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || [ -e /usr/lib/faketime/libfaketime.so.1 ] ;;
    esac
}

missing=()
for package in postgresql pgbouncer mariadb-server redis-server redis-sentinel memcached etcd-server zookeeper libfaketime; do
    have "$package" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
can_install ||
    stop "these servers are missing: ${missing[*]} (Debian's names); install them, or run this as root or with sudo on Debian"

say "installing Debian's ${missing[*]} (once, about a minute)…"
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
apt_install "${missing[@]}" || stop "Debian's packages ${missing[*]} could not be installed; apt's words are above"
for package in "${missing[@]}"; do
    have "$package" || stop "the package $package was installed, but what it should have brought is not where it was looked for"
done
