"""What is wrong with where a client shall connect to is said by `connect()`, before any I/O, and so that it helps."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

import dibs
from dibs.connecting import _SCHEMES

# By scheme: what the store cannot do without, of which one will do, and the extra that brings it.
DRIVERS: dict[str, tuple[list[str], str]] = {
    "postgresql": (["psycopg"], "postgres"),
    "postgres": (["psycopg"], "postgres"),
    "mysql": (["MySQLdb", "pymysql"], "mysql"),
    "mariadb": (["MySQLdb", "pymysql"], "mysql"),
    "redis": (["redis"], "redis"),
    "rediss": (["redis"], "redis"),
    "valkey": (["redis"], "redis"),
    "valkeys": (["redis"], "redis"),
    "memcached": (["pymemcache"], "memcached"),
    "zookeeper": (["kazoo"], "zookeeper"),
}
# Connecting without a driver; sockets are refused, so that whatever would be sent is an error of its own.
WITHOUT = """
import socket, sys
for name in {drivers!r}:
    sys.modules[name] = None
def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import dibs
try:
    dibs.{door}({url!r})
except dibs.InvalidOption as error:
    print(error)
"""


# What speaks to its store with the standard library alone.
NEED_NOTHING = {
    "sqlite": "sqlite:////x.db",
    "memory": "memory://",
    "etcd": "etcd://host.invalid",
    "etcds": "etcds://host.invalid",
}


def test_the_tables_are_of_all_stores() -> None:
    """Every scheme is tried below."""
    assert DRIVERS.keys() | NEED_NOTHING.keys() == _SCHEMES.keys()


@pytest.mark.parametrize("url", NEED_NOTHING.values(), ids=NEED_NOTHING)
def test_stores_without_a_driver_need_none(url: str) -> None:
    """What has no extra loads nothing but Python and dibs."""
    program = (
        f"import dibs, sys; before = set(sys.modules); dibs.connect({url!r})\n"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] not in {'dibs', *sys.stdlib_module_names}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("door", ["connect", "connect_async"])
@pytest.mark.parametrize("scheme", DRIVERS)
def test_a_missing_driver_is_named_with_the_command_that_installs_it(scheme: str, door: str) -> None:
    """Without its driver a store is InvalidOption from `connect()`, with the pip command; nothing is sent."""
    drivers, extra = DRIVERS[scheme]
    program = WITHOUT.format(drivers=drivers, door=door, url=f"{scheme}://host.invalid/x")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pip install 'dibs[{extra}]'" in done.stdout, done


@pytest.mark.parametrize(
    "url, meant",
    [
        ("postgress://db/prod", "postgres"),
        ("postgre://db/prod", "postgres"),
        ("sqlite3:///x.db", "sqlite"),
        ("mysq://db", "mysql"),
        ("memcache://cache", "memcached"),
        ("REDDIS://cache", "redis"),
        ("zookeper://zk", "zookeeper"),
    ],
)
def test_a_scheme_that_is_nearly_right(url: str, meant: str) -> None:
    """A typo in a URL's scheme is told with what was probably meant, and with all that is known."""
    with pytest.raises(dibs.InvalidOption, match=rf"unknown store .*\(did you mean '{meant}'\?\). This dibs knows"):
        dibs.connect(url)


def test_a_scheme_that_nobody_knows() -> None:
    """A store that is not there is told with those that are; the rest of the URL is not shown."""
    with pytest.raises(dibs.InvalidOption) as caught:
        dibs.connect("oracle://scott:tiger@db/prod")
    assert "unknown store 'oracle'. This dibs knows" in str(caught.value)
    for scheme in _SCHEMES.keys() - {"postgres"}:
        assert scheme in str(caught.value)
    assert "tiger" not in str(caught.value)


@pytest.mark.parametrize(
    "url, said",
    [
        (
            "sqlite:////x.db?tabel=a",
            r"option 'tabel' \(did you mean 'table'\?\). SQLite knows table, and every",
        ),
        (
            "sqlite:////x.db?colour=a",
            r"option 'colour'. SQLite knows table, and every URL may have namespace, ttl",
        ),
        ("sqlite:////x.db?Table=a", r"\(did you mean 'table'\?\)"),
        ("postgresql://h/d?shema=a", r"\(did you mean 'schema'\?\). PostgreSQL knows table, schema, "),
        ("postgresql://h/d?sslmod=a", r"\(did you mean 'sslmode'\?\)"),
        ("memory://?tll=3", r"\(did you mean 'ttl'\?\). Every URL may have namespace, ttl, "),
        ("memory://?name_space=3", r"\(did you mean 'namespace'\?\)"),
        ("memory://?ttl=soon", "ttl='soon' is not a number of seconds"),
        ("memory://?ttl=3&ttl=4", "'ttl' is given twice"),
        ("memory://?require=durabel", r"\(did you mean 'durable'\?\)"),
        ("memory://?require=speed", "require='speed' names no promise .* durable, survives_restart, fencing_token"),
    ],
)
def test_a_typo_in_an_option(url: str, said: str) -> None:
    """An unknown option is told with the one that was probably meant, and with those that this store knows."""
    with pytest.raises(dibs.InvalidOption, match=said):
        dibs.connect(url)


def test_windows_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is tried there: the service threads wait on descriptors as only POSIX systems can."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(dibs.Unsupported, match="WSL"):
        dibs.connect("memory://")


def test_eventlet_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything waits: threads of dibs would find out later, and nobody would hear of it."""
    monkeypatch.delattr(select, "poll")
    with pytest.raises(dibs.Unsupported, match="eventlet"):
        dibs.connect("memory://")


def test_options_may_stand_beside_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`options=` takes what the URL's query takes, also without a URL, and is checked as the query is."""
    monkeypatch.delenv("DIBS_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for where in (None, f"sqlite:///{tmp_path}/x.db"):
        with dibs.connect(where, options={"table": "mine", "namespace": "n", "ttl": "7"}) as client:
            lease = client.lock("x").acquire(timeout=0)
            assert lease is not None
            assert lease.ttl == 7
        with pytest.raises(dibs.InvalidOption, match="did you mean 'table'"):
            dibs.connect(where, options={"tabel": "mine"})
        with pytest.raises(dibs.InvalidOption, match="did you mean 'durable'"):
            dibs.connect(where, options={"require": "durabel"})


# -- stores of others -------------------------------------------------------------------------------------------------


def package(site: Path, name: str, entry: str, code: str) -> None:
    """A package with a store, as pip would leave it."""
    (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dibs.stores]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_store_of_others_is_found(site: Path) -> None:
    """A scheme that an entry point brings works, is listed among those known, and has its options told."""
    package(
        site,
        "others_good",
        "shelf = others_good:address",
        "from dibs.stores import memory\n"
        "OPTIONS = ('colour',)\n"
        "def address(url, options):\n"
        "    options.pop('colour', None)\n"
        "    return memory.address(url.netloc)\n",
    )
    with dibs.connect("shelf://others?colour=red&ttl=9") as client, client.lock("x") as lease:
        assert lease.ttl == 9
    with pytest.raises(dibs.InvalidOption, match=r"\(did you mean 'colour'\?\). memory knows colour, and every URL"):
        dibs.connect("shelf://others?color=red")
    with pytest.raises(dibs.InvalidOption, match=r"\(did you mean 'shelf'\?\). This dibs knows .*, shelf, sql"):
        dibs.connect("shelve://others")


def test_a_store_of_others_that_cannot_be_loaded(site: Path) -> None:
    """An entry point that leads nowhere, or fails to load, is InvalidOption that names the package."""
    package(site, "others_gone", "gone = others_gone:no_such_function", "")
    package(site, "others_needy", "needy = others_needy:address", "import no_such_driver")
    with pytest.raises(dibs.InvalidOption, match=r"'gone' of others_gone \(others_gone:no_such.*\) cannot be loaded"):
        dibs.connect("gone://x")
    with pytest.raises(dibs.InvalidOption, match=r"'needy' of others_needy .* cannot be loaded: No module named"):
        dibs.connect("needy://x")


def test_two_packages_with_one_scheme(site: Path) -> None:
    """Which of two stores a URL means is not guessed."""
    package(site, "others_one", "twice = others_one:address", "")
    package(site, "others_two", "twice = others_two:address", "")
    with pytest.raises(dibs.InvalidOption, match=r"several packages offer a store 'twice': others_.* others_.* Keep"):
        dibs.connect("twice://x")


def test_a_store_of_others_that_returns_something_else(site: Path) -> None:
    """A function that returns no StoreAddress is a mistake of its author, who is told where it is."""
    package(site, "others_odd", "odd = others_odd:address", "def address(url, options):\n    return 'nothing'\n")
    with pytest.raises(TypeError, match=r"others_odd.address did not return a dibs.store.StoreAddress"):
        dibs.connect("odd://x")
