"""URLs with several hosts, IPv6 addresses and logins: what the stores make of them, the same under every Python."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from psycopg.conninfo import conninfo_to_dict

import dibs
from dibs.connecting import locate
from dibs.stores.etcd_address import access_to
from dibs.stores.memcached_address import servers
from dibs.stores.memcached_spread import RISK
from dibs.stores.postgres_address import place
from dibs.stores.redis import RedisStore
from dibs.stores.zookeeper_address import settings
from dibs.urls import split_url


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0",
        "postgresql:///db?host=/run",
        "memory://x/y?ttl=3#f",
        "mysql+pymysql://u:p%40@h/d",
        "redis+unix:///p a",
        "x://a?b/c://d",
        "x://a#b?c",
        "sqlite:////x.db?table=a",
        "Shelf://Other/p",
        "x:////p",
        "redis://[::1]:6379/0",
        "redis://h:6379/0\n",
    ],
)
def test_one_host_is_what_urlsplit_says(url: str) -> None:
    """A URL of one host has the parts that the standard library finds."""
    assert split_url(url) == urlsplit(url)


@pytest.mark.parametrize(
    "places",
    [
        "h:x",
        "h:-1",
        "h:65536",
        "h:1:2",
        "::1",
        "[::1",
        "::1]",
        "[]",
        "[::1]x",
        "x[::1]",
        "[::1]:x",
        "a,[::1",
        "a,b:x,c",
        "a..b",
        ".a",
        "a" * 64,
        "a,b..c:1",
        "%ff",
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "etcd", "zookeeper", "memcached", "postgresql", "mysql"])
def test_what_is_no_host_or_port_is_refused(scheme: str, places: str) -> None:
    """A port that is none, and brackets that do not fit, are InvalidOption on every store; nothing of it is shown."""
    with pytest.raises(dibs.InvalidOption, match="its ports, its brackets") as caught:
        locate(f"{scheme}://app:s3cret@{places}/1")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "etcd", "zookeeper", "memcached", "postgresql", "mysql", "memory"])
@pytest.mark.parametrize("wrong", ["\udcff", "\0", "%00"])
def test_what_is_no_text_is_refused(scheme: str, wrong: str) -> None:
    """Bytes that are no UTF-8, wherever they stand, and NUL; nothing of it is shown."""
    for rest in (f"{wrong}/1", f"app:s3cret{wrong}@h/1", f"h/s3cret{wrong}", f"h/1?user=s3cret{wrong}"):
        with pytest.raises(dibs.InvalidOption) as caught:
            locate(f"{scheme}://{rest}")
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["app:s3cret://h", "app:s3cret@h/d?next=http://x", "s3 cret://h", "app:s3cret@h:1/d"])
def test_a_login_that_stands_for_the_scheme_is_not_shown(url: str) -> None:
    """What was pasted without its beginning may hold a password."""
    with pytest.raises(dibs.InvalidOption) as caught:
        locate(url)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite:////x.db", "postgresql://x@h/d", "mysql://x@h/d"])
def test_a_table_whose_others_would_have_too_long_names_is_refused(url: str) -> None:
    """The name that the user gave is, and at once: not that of an index in the first request, nor by the database."""
    locate(f"{url}?table={'t' * 52}")
    with pytest.raises(dibs.InvalidOption, match=r"table='t+' is longer than 52 bytes"):
        locate(f"{url}?table={'t' * 53}")


def test_the_file_of_an_sqlite_url() -> None:
    """Neither a folder called ~ in the working directory is meant, nor what stands before a NUL or a #."""
    for path in ("~/dibs.db", "~user/dibs.db", "/tmp/a%00b", "/tmp/a\0b", "/tmp/a#b.db"):
        with pytest.raises(dibs.InvalidOption):
            locate(f"sqlite:///{path}")
    assert locate("sqlite:///./~a")[0].shown.endswith("/~a")
    assert locate("sqlite:////tmp/\udcff")[0].shown == "sqlite:////tmp/\udcff"


LOGIN = "us%40er:p%5B%2C%3A%2F"  # us@er, p[,:/
HOSTS = "a,b:12,[::1],[fe80::2]:34,10.0.0.1:56"


def test_etcd_takes_hosts_of_all_kinds() -> None:
    """Names, IPv4 and IPv6 addresses, with ports and without; escapes in the login."""
    access = access_to(split_url(f"etcd://{LOGIN}@{HOSTS}"), {})
    assert access.endpoints == (("a", 2379), ("b", 12), ("::1", 2379), ("fe80::2", 34), ("10.0.0.1", 56))
    assert (access.user, access.password) == ("us@er", "p[,:/")


def test_zookeeper_takes_hosts_of_all_kinds() -> None:
    """The same; kazoo wants the brackets, and a login as it is."""
    found = settings(split_url(f"zookeeper://{LOGIN}@{HOSTS}/chroot"), {})
    assert found.hosts == ("a:2181", "b:12", "[::1]:2181", "[fe80::2]:34", "10.0.0.1:56")
    assert (found.login, found.root) == ("us@er:p[,:/", "/chroot")


def test_memcached_takes_hosts_of_all_kinds() -> None:
    """The same, for who takes the risk of several."""
    found = servers(split_url(f"memcached://{LOGIN}@{HOSTS}"), {"spread": RISK})
    assert [one.server for one in found.places] == [
        *(("a", 11211), ("b", 12), ("::1", 11211), ("fe80::2", 34), ("10.0.0.1", 56))
    ]
    assert (found.places[0].user, found.places[0].password) == ("us@er", "p[,:/")


def test_postgresql_takes_hosts_of_all_kinds() -> None:
    """As libpq has them: hosts in one row, ports in another."""
    found = place(split_url(f"postgresql://{LOGIN}@{HOSTS},%2Frun%2Fpg/db"), {})
    servers = [conninfo_to_dict(conninfo.decode()) for conninfo in found.conninfos]
    places = [(server["host"], server.get("port")) for server in servers]
    assert places == [("a", None), ("b", "12"), ("::1", None), ("fe80::2", "34"), ("10.0.0.1", "56"), ("/run/pg", None)]
    assert {server["user"] for server in servers} == {"us@er"}


@pytest.mark.parametrize("kind, port", [("sentinel=main", 26379), ("cluster=true", 6379)])
def test_redis_takes_hosts_of_all_kinds(kind: str, port: int) -> None:
    """Sentinels and nodes of a cluster."""
    store = locate(f"redis://{LOGIN}@{HOSTS}?{kind}")[0].open()
    assert isinstance(store, RedisStore)
    where = store._place
    assert where.hosts == (("a", port), ("b", 12), ("::1", port), ("fe80::2", 34), ("10.0.0.1", 56))
    assert (where.login["username"], where.login["password"]) == ("us@er", "p[,:/")


@pytest.mark.parametrize(
    "url",
    [
        *("redis://[::1]/2", "etcd://[::1]", "zookeeper://[::1]", "memcached://[::1]"),
        *("postgresql://[::1]/db", "mysql://[::1]/db"),
    ],
)
def test_an_ipv6_address_alone(url: str) -> None:
    """It stands in brackets, and is shown so."""
    assert "//[::1]" in locate(url)[0].shown


@pytest.mark.parametrize("name", ["a.db", "what? a file #1, 50%41 é.db", os.fsdecode(b"\xff.db")])
def test_the_path_of_an_sqlite_file_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    """``connect(Path(…))`` opens that file and no other, whatever bytes its name is made of."""
    with dibs.connect(tmp_path / name, options={"ttl": "7"}) as client, client.lock("x") as lease:
        assert lease.ttl == 7
    assert [path.name for path in tmp_path.iterdir()] == [name]
    url = f"sqlite:///{quote(os.fsencode(tmp_path / name))}"
    with dibs.connect(url) as client, client.lock("x") as lease:
        assert lease.fencing_token == 2


@pytest.mark.parametrize("path", ["~/locks.db", ":memory:"])
def test_a_path_that_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(Path(path))
