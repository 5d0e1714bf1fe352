# Sourced by the set-up scripts: how they install Debian packages. It changes nothing by being read.

say() { printf '%s\n' "$*" >&2; }

# The one sentence that ends a set-up which cannot go on.
stop() {
    say "dibs: $*"
    exit 1
}

# as_root COMMAND…: as root, or through sudo where it asks for no password.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        sudo -n -- "$@"
    fi
}

can_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null
}

# There are lists, and they were fetched today: the folder's time tells, as the files carry the times of the archive.
apt_lists_are_fresh() {
    [ -n "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -print -quit 2>/dev/null)" ] &&
        [ -n "$(find /var/lib/apt/lists -maxdepth 0 -mtime -1 2>/dev/null)" ]
}

apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
        apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"
}

# apt_install PACKAGE…: quiet when it works; the whole of apt's words when it does not.
apt_install() {
    local log attempt
    log=$(mktemp)
    for attempt in 1 2 3; do
        if [ "$attempt" -gt 1 ] || ! apt_lists_are_fresh; then
            apt_get update >>"$log" 2>&1 || true # an old list may still do, and the install says so if not
        fi
        if apt_get install -y --no-install-recommends "$@" >>"$log" 2>&1 </dev/null; then
            rm -f "$log"
            return 0
        fi
        [ "$attempt" -eq 3 ] || sleep $((attempt * 5))
    done
    cat "$log" >&2
    rm -f "$log"
    return 1
}
