"""What a MySQL URL says."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import InvalidOption
from dibs.stores.identifiers import check_table
from dibs.stores.mysql_drivers import DRIVERS, SSL_MODES, Where

if TYPE_CHECKING:
    from collections.abc import Callable
    from urllib.parse import SplitResult

    from dibs.stores.mysql_drivers import Link

# What drivers and SQLAlchemy take in a URL and dibs decides itself.
_OURS = ("charset", "use_unicode", "autocommit", "connect_timeout", "read_timeout", "write_timeout", "binary_prefix")
_SSL_WORDS = ("ssl", "ssl_disabled", "ssl_verify_cert", "ssl_verify_identity", "ssl_check_hostname")
#: What a URL may carry.
OPTIONS = ("table", "driver", "unix_socket", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key", *_SSL_WORDS, *_OURS)
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_SQLALCHEMY_DRIVERS = {"pymysql": "pymysql", "mysqldb": "mysqlclient", "mysqlclient": "mysqlclient"}


class Place(NamedTuple):
    #: For people; it never holds a password.
    shown: str
    where: Where
    table: str
    connect: Callable[[Where, float], Link]


def place(url: SplitResult, options: dict[str, str]) -> Place:
    """Where it points; what is understood is taken out of the options."""
    table = options.pop("table", "dibs_lease")
    check_table(table)
    if table != table.rstrip() or any(ord(letter) > 0xFFFF for letter in table):
        raise InvalidOption(f"table={table!r}: MySQL takes no name that ends in a space or has letters above U+FFFF")
    driver = options.pop("driver", "").lower()
    if driver and driver not in _SQLALCHEMY_DRIVERS:
        raise InvalidOption(f"driver={driver!r} is none of {', '.join(DRIVERS)}")
    driver = _SQLALCHEMY_DRIVERS.get(driver or url.scheme.partition("+")[2], "")
    for name in _OURS:
        options.pop(name, None)
    database = unquote(url.path[1:])
    if not database:
        raise InvalidOption("a MySQL URL names a database: mysql://user@host/database")
    if "," in url.netloc.rpartition("@")[2]:
        raise InvalidOption("name one MySQL server: grants are made by the primary; its address may be that of a proxy")
    unix_socket = options.pop("unix_socket", "")
    host = url.hostname or "localhost"
    where = Where(
        host=unquote(host),
        port=url.port or 3306,
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
        database=database,
        unix_socket=unix_socket,
        ssl_mode=_ssl_mode(options),
        ssl_ca=options.pop("ssl_ca", ""),
        ssl_cert=options.pop("ssl_cert", ""),
        ssl_key=options.pop("ssl_key", ""),
    )
    for option in ("ssl_ca", "ssl_cert", "ssl_key"):
        _check_file(option, getattr(where, option))
    return Place(f"mysql://{where.at}/{database}", where, table, _connector(driver))


def _connector(driver: str) -> Callable[[Where, float], Link]:
    """What connects with this driver; "" takes the better one that is installed."""
    for name in (driver,) if driver else DRIVERS:
        try:
            if name == "pymysql":
                from dibs.stores.mysql_pymysql import Connector

                return Connector()
            from dibs.stores.mysql_mysqlclient import connect

            return connect
        except ImportError as missing:
            error = missing
    package = {"mysqlclient": "mysqlclient: pip install mysqlclient"}.get(driver, "PyMySQL: pip install 'dibs[mysql]'")
    raise InvalidOption(f"MySQL and MariaDB need {package}") from error


def _check_file(option: str, path: str) -> None:
    """Refuse a file that is not to be read: the drivers would say so when they connect, each in its own way."""
    if path:
        try:
            open(path, "rb").close()
        except OSError as error:
            raise InvalidOption(f"{option} in the MySQL URL cannot be read: {error}") from None


def _ssl_mode(options: dict[str, str]) -> str:
    """One of MySQL's own five words, from it or from what the drivers and SQLAlchemy say instead."""
    said = {name: _boolean(name, options.pop(name)) for name in _SSL_WORDS if name in options}
    mode = options.pop("ssl_mode", "").lower()
    if mode:
        if mode not in SSL_MODES:
            raise InvalidOption(f"ssl_mode={mode!r} is none of {', '.join(SSL_MODES)}")
        return mode
    if said.get("ssl_disabled") or said.get("ssl") is False:
        return "disabled"
    if said.get("ssl_verify_identity") or said.get("ssl_check_hostname"):
        return "verify_identity"
    if said.get("ssl_verify_cert") or (options.get("ssl_ca") and said.get("ssl_verify_cert") is not False):
        return "verify_ca"
    if said.get("ssl") or options.get("ssl_cert") or options.get("ssl_ca"):
        return "required"
    return "preferred"


def _boolean(name: str, text: str) -> bool:
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise InvalidOption(f"{name}={text!r} is neither true nor false")
