"""The page on frameworks: its blocks call dibs rightly.

Django is the real one; of the others there is as much as the blocks use.
"""

import asyncio
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dibs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "frameworks.md"


def block(word: str) -> str:
    """The code on the page in which ``word`` stands."""
    blocks = re.findall(r"^```python no-run\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    found = [text for text in blocks if word in text]
    assert len(found) == 1, f"{len(found)} blocks have {word!r}"
    return str(found[0])


def as_it_is(*_: object, **__: object) -> Any:
    """A decorator that leaves a function alone."""
    return lambda function: function


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    """Something to be imported under this name."""
    made = ModuleType(name)
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    made = f"memory://{tmp_path.name}"
    monkeypatch.setenv("DIBS_URL", made)
    return made


DJANGO = """
import django
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}})
django.setup()
from django.db import connection, transaction
from django.http import HttpResponse
%s
%s
def write_totals(month):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO book VALUES (%%s)", [month])
locks().setup()
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE book (month TEXT PRIMARY KEY)")
assert close_books(None, "2026-07").status_code == 200
assert locks().queue("mail").depth().ready == 1
try:
    close_books(None, "2026-07")
except django.db.IntegrityError:
    assert locks().queue("mail").depth().ready == 1
with locks().lock("books/2026-08"):
    assert close_books(None, "2026-08").status_code == 409
print("as shown")
"""


def test_django(tmp_path: Path) -> None:
    """The view closes the books and puts the mail in one transaction, or says that somebody else is at it."""
    program = DJANGO % (block("functools.cache"), block("close_books"))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "as shown\n"), done.stderr


def test_fastapi(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The endpoint makes the report, or says that somebody else is at it."""

    class Refused(Exception):
        pass

    app = SimpleNamespace(post=as_it_is, exception_handler=as_it_is, state=SimpleNamespace())
    module(monkeypatch, "fastapi", FastAPI=lambda lifespan: app, HTTPException=Refused, Request=object)
    module(monkeypatch, "fastapi.responses", JSONResponse=dict)

    async def make_report(month: str, fence: int) -> str:
        return f"{month} under {fence}"

    shown: dict[str, Any] = {"make_report": make_report}
    exec(block("lifespan"), shown)

    async def requests() -> None:
        async with shown["lifespan"](app):
            assert await shown["report"]("2026-07", SimpleNamespace(app=app)) == "2026-07 under 1"
            with dibs.connect(url) as other, other.lock("report/2026-07"), pytest.raises(Refused):
                await shown["report"]("2026-07", SimpleNamespace(app=app))

    asyncio.run(requests())


def test_celery(url: str) -> None:
    """A task that finds its customer taken comes again later, and a second sweep is skipped."""

    class Again(Exception):
        def __init__(self, countdown: int) -> None:
            super().__init__(countdown)

    def task(function: Any = None, **_: object) -> Any:
        return function or as_it_is()

    pulled: list[tuple[str, int]] = []
    swept: list[bool] = []
    shown: dict[str, Any] = {
        "dibs": dibs,
        "celery": SimpleNamespace(Celery=lambda *_, **__: SimpleNamespace(task=task)),
        "pull_orders": lambda customer, fence: pulled.append((customer, fence)),
        "remove_old_files": lambda: swept.append(True),
    }
    exec(block("celery"), shown)
    itself = SimpleNamespace(retry=Again)
    with shown["client"], dibs.connect(url) as other:
        shown["sync"](itself, "ann")
        shown["sweep"]()
        with other.lock("sync/ann"), pytest.raises(Again):
            shown["sync"](itself, "ann")
        with other.lock("sweep"):
            assert shown["sweep"]() is None
    assert (pulled, swept) == ([("ann", 1)], [True])


def test_apscheduler(url: str) -> None:
    """Of several schedulers one makes the report, and one polls in each minute."""
    made: list[str] = []
    with dibs.connect(url) as client, dibs.connect(url) as other:
        for each in (client, other):
            shown: dict[str, Any] = {
                "date": date,
                "scheduler": SimpleNamespace(scheduled_job=as_it_is),
                "client": each,
                "send_report": lambda: made.append("report"),
                "fetch_new_mail": lambda: made.append("mail"),
            }
            exec(block("scheduler."), shown)
            shown["morning"]()
            shown["poll"]()
    assert made == ["report", "mail"]
