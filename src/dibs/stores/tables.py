"""What becomes of the tables of the SQL stores: made when a statement finds none, and what a crash may take of them."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, TypeVar
from dibs._version import __version__
from dibs.errors import SetupRequired

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.store import Capabilities

_T = TypeVar("_T")

# What settings may let a crash take of what was acknowledged.
SECONDS = "the last second or two"
UNWRITTEN = "what the system had not written yet"


class TablesMissing(Exception):
    """The statement needs a table, schema, column or row that setting up makes. It has changed nothing."""


class TablesNewer(SetupRequired):
    """A later dibs has changed the tables: what this one would make beside them, or write there, nobody else heeds."""


def newer(found: int, known: int) -> TablesNewer:
    """The error where the tables are of a greater version than the one this dibs knows."""
    return TablesNewer(
        f"a newer dibs has changed the tables of dibs: they are of version {found}, and this one, {__version__}, "
        f"knows {known}. Install the newer one here, too"
    )


def refuse_newer(found: int | str | bytes | None, known: int) -> None:
    """Raise TablesNewer, if the version found in the tables (None: none) is greater than the one this dibs knows."""
    if found is not None and int(found) > known:
        raise newer(int(found), known)


def with_tables(attempt: Callable[[], _T], make: Callable[[], None]) -> _T:
    """Attempt it; when it turns out that there are no tables, make them, and attempt it once more."""
    try:
        return attempt()
    except TablesMissing:
        pass
    try:
        make()
    except TablesNewer:
        raise
    except SetupRequired as refused:
        raise SetupRequired(
            f"the tables of dibs are missing or of an older version, and this login may not make them ({refused}). "
            "Let somebody who may run `dibs setup`, or what `dibs schema` prints"
        ) from refused
    try:
        return attempt()
    except TablesMissing as error:
        raise SetupRequired(f"the tables of dibs do not fit this version: {error}") from error


def set_up(make: Callable[[], None]) -> None:
    """Make the tables, or bring them up to date, because somebody asked for it."""
    try:
        make()
    except TablesNewer:
        raise
    except SetupRequired as refused:
        raise SetupRequired(
            f"{refused}. Let somebody with the right to make tables run `dibs setup`, or what `dibs schema` prints"
        ) from refused


def without_history() -> SetupRequired:
    """What is raised where the tables of the history are missing."""
    return SetupRequired("no history is kept here: `dibs setup --history 100` begins one")


def after_a_crash(offered: Capabilities, lost: str) -> Capabilities:
    """What is left of the capabilities where a crash takes that; nothing: all."""
    if not lost:
        return offered
    return offered._replace(
        survives_restart=f"yes, but for {lost}",
        durable=False,
        fencing_token="strict while no crash loses acknowledged commits",
    )
