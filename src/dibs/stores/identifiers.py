"""Names of tables, schemas and columns given by a user: checked, then quoted, so that they can stand in SQL text."""

from __future__ import annotations

from dibs.errors import InvalidOption

# PostgreSQL cuts identifiers at 63 bytes; the longest suffix dibs adds to the name of its table is "_line_name".
IDENTIFIER_BYTES_MAX = 63
TABLE_BYTES_MAX = 52
assert TABLE_BYTES_MAX + len("_line_name") <= IDENTIFIER_BYTES_MAX


def check_table(name: str) -> None:
    """InvalidOption for what cannot be the name of the table of the leases, after which others are called."""
    quoted_table(name)
    if len(name.encode()) > TABLE_BYTES_MAX:
        raise InvalidOption(
            f"table={name!r} is longer than {TABLE_BYTES_MAX} bytes: dibs makes more tables, whose names begin with it"
        )


def quoted_table(name: object, what: str = "table") -> str:
    """The identifier in double quotes, or InvalidOption."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > IDENTIFIER_BYTES_MAX:
        raise InvalidOption(f"{what}={name!r} is not a {what} name of at most {IDENTIFIER_BYTES_MAX} printable bytes")
    return '"' + name.replace('"', '""') + '"'


def quoted_part(name: str, what: str, mark: str = '"') -> str:
    """The identifier in the quotes of its dialect, or InvalidOption."""
    checked = quoted_table(name, what)
    return checked if mark == '"' else mark + name.replace(mark, mark * 2) + mark


def quoted(table: object, mark: str = '"') -> str:
    """A table, perhaps with its schema before a dot, as it stands in SQL; InvalidOption for what is none."""
    if not isinstance(table, str):
        raise InvalidOption(f"table is the name of a table, perhaps with its schema before a dot, not {table!r}")
    return ".".join(quoted_part(part, "table", mark) for part in table.split("."))


def dollar_quote(tag: str, text: str) -> str:
    """What begins and ends PostgreSQL's quote ``$tag$ … $tag$`` around a text that does not end it."""
    while f"${tag}$" in text:
        tag += "_"
    return f"${tag}$"
