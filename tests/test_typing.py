"""What programs do with the types of dibs while they run, where `dibs._typing` stands in for `typing`."""

from __future__ import annotations

import copy
import pickle
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

import dibs
from dibs import jobs, store

V = TypeVar("V")
RECORDS = [getattr(dibs, name) for name in dibs.__all__ if hasattr(getattr(dibs, name), "_fields")]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_is_a_named_tuple(record: Any) -> None:
    """A record can be pickled, copied, replaced, matched, shown and compared, and refuses what it has no field for."""
    one = record(*range(len(record._fields)))
    assert record.__match_args__ == record._fields == tuple(one._asdict())
    assert repr(one).startswith(f"{record.__name__}({record._fields[0]}=0, ")
    assert one == tuple(one)
    assert hash(one) == hash(tuple(one))
    assert one._replace(**{record._fields[0]: "x"})[0] == "x"
    for twin in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert type(twin) is record
        assert twin == one
    assert not hasattr(one, "__dict__")
    assert record.__annotations__.keys() == set(record._fields)
    with pytest.raises(TypeError, match="no_such_field"):
        record(**one._asdict(), no_such_field=1)


def test_a_generic_keeps_what_it_is_of() -> None:
    """`Batch[int]` evaluated tells its class and its arguments, is equal to itself alone, and can be derived from."""

    @dataclass
    class Held:
        batch: dibs.Batch[int]
        item: dibs.Item[str] | None = None

    hints = typing.get_type_hints(Held, localns={"dibs": dibs})
    assert typing.get_origin(hints["batch"]) is dibs.Batch
    assert typing.get_args(hints["batch"]) == (int,)
    assert hints["batch"] == dibs.Batch[int]
    assert hints["batch"] != dibs.Batch[str]
    assert hints["item"] == dibs.Item[str] | None

    class Mine(dibs.Batch[V], Generic[V]):
        pass

    assert typing.get_args(Mine[int]) == (int,)


@pytest.mark.parametrize("union", [store.Request, store.Outcome, jobs.JobRequest, jobs.JobOutcome], ids=str)
def test_what_a_store_is_asked_and_answers_are_unions(union: Any) -> None:
    """A store of a third party can evaluate `Request | None`, and ask `isinstance(it, Outcome)`."""
    members = typing.get_args(union)
    assert typing.get_args(union | None) == (*members, type(None))
    for member in members:
        assert isinstance(member(*range(len(member._fields))), union)


def test_hints_that_name_only_builtins_can_be_evaluated() -> None:
    """`typing.get_type_hints` works on classes and methods whose annotations name nothing that only checkers import."""
    assert typing.get_type_hints(dibs.QueueDepth)["oldest_s"] is float
    assert typing.get_type_hints(dibs.Lease.guard)["return"] is type(None)
    assert "connection" in typing.get_type_hints(dibs.Item.done)


def test_a_choice_among_words_is_a_str() -> None:
    """`Literal["raise", "skip"]` is what type checkers see; evaluated it is the class of the words."""
    put = dibs.Queue.put
    assert eval(put.__annotations__["on_conflict"], put.__globals__) is str
