"""Switches of threads between any two instructions of dibs, not only where it calls its clock.

An interpreter with a global lock lets another thread go on after a call, at the start of a function and at a jump back;
one without it has no place where others do not go on. Here every function of dibs is compiled once more with a *look*
behind each call and each reading of an attribute or an element, and at the start of each function and each turn of a
loop. A look puts its thread aside now and then, so that a scenario meets up to a few hundred such switches, several
threads deep.

The stores stay as they are: in the simulation a request is atomic. What may not see itself interrupted are the eyes of
the world, its checker and its network.
"""

from __future__ import annotations

import ast
import builtins
import gc
import inspect
import operator
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, TypeVar

import dibs
from dibs.aio.tasks import _MAILBOXES
from tests.simulation import bugs, network, process
from tests.simulation.checker import Checker
from tests.simulation.job_books import Books
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

T = TypeVar("T")

# How likely a look lets other threads go on, in which worlds.
PARTS = (0.0005, 0.003, 0.02)
_DIBS = Path(dibs.__file__).parent
_EYES = frozenset({network.__file__, process.__file__})
# By these names a function with looks calls what it needs.
_LOOK = "__look__"
_IN_PLACE: dict[type[ast.operator], tuple[str, Callable[..., object]]] = {
    ast.Add: ("__iadd__", operator.iadd),
    ast.Sub: ("__isub__", operator.isub),
}


class _Looks(ast.NodeTransformer):
    """Puts them in."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _look(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _look(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return _look(node) if isinstance(node.ctx, ast.Load) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """``a.b += c`` reads and writes: between the two others go on."""
        self.generic_visit(node)
        target = node.target
        if not isinstance(target, ast.Attribute) or type(node.op) not in _IN_PLACE:
            return node
        name, _ = _IN_PLACE[type(node.op)]
        read = ast.Attribute(target.value, target.attr, ast.Load())
        changed = ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [read, node.value], []), node)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], _look(changed)), node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._begin(node.body)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self._begin(node.body)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.body[0]))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.body[0]))
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        """A pattern is no expression."""
        if node.guard is not None:
            node.guard = self.visit(node.guard)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def _begin(self, body: list[ast.stmt]) -> None:
        """Only the body: decorators, defaults and annotations are not what runs in a world."""
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = _statement(body[0])
        body[:] = [self.visit(statement) for statement in body]
        body.insert(1 if documented else 0, first)


def _look(value: ast.expr) -> ast.expr:
    name = ast.Name(_LOOK, ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Call(name, [value], []), value))


def _statement(near: ast.stmt) -> ast.stmt:
    value = ast.copy_location(ast.Constant(None), near)
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(_look(value)), near))


def _put_in(tree: ast.Module) -> ast.Module:
    found: ast.Module = _Looks().visit(tree)
    return found


def _sources() -> list[Path]:
    return sorted(path for part in ("*.py", "aio/*.py") for path in _DIBS.glob(part) if not path.stem.startswith("__"))


@cache
def _with_looks() -> dict[object, CodeType]:
    """The functions of dibs with looks in them. (Lambdas that stand in one line are not told apart, and left.)"""
    found: dict[object, CodeType | None] = {}
    for path in _sources():
        module = compile(_put_in(ast.parse(path.read_text(encoding="utf-8"))), str(path), "exec", dont_inherit=True)
        for code in _functions(module):
            found[_key(code)] = None if _key(code) in found else code
    return {key: code for key, code in found.items() if code is not None}


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)


def _key(code: CodeType) -> object:
    return code.co_filename, code.co_name, code.co_firstlineno, code.co_freevars


@contextmanager
def switches() -> Iterator[None]:
    """While this lasts, the functions of dibs have looks in them, and so have bugs that are planted."""
    for path in _sources():  # what is loaded within a seed would make its first run another one
        import_module(".".join(path.relative_to(_DIBS.parent).with_suffix("").parts))
    new = _with_looks()
    old: list[tuple[FunctionType, CodeType]] = []
    # They stay: what an earlier world left to the garbage collector may run at any time.
    setattr(builtins, _LOOK, _Looker().look)
    for name, function in _IN_PLACE.values():
        setattr(builtins, name, function)
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen is not listed
    for found in gc.get_objects():
        if type(found) is FunctionType and _key(found.__code__) in new:
            old.append((found, found.__code__))
            code = new[_key(found.__code__)]
            marked = found.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE  # as a decorator did
            found.__code__ = code.replace(co_flags=code.co_flags | marked)
    if frozen:
        gc.freeze()
    bugs.transforms.append(_put_in)
    World.switched = True
    try:
        yield
    finally:
        _MAILBOXES.clear()
        gc.collect()  # what is left of the worlds may end in functions with looks
        World.switched = False
        bugs.transforms.remove(_put_in)
        for function, code in old:
            function.__code__ = code


class _Looker:
    def __init__(self) -> None:
        self._eyes = {
            value.__code__
            for kind in (*_kinds(Checker), Books)
            for value in vars(kind).values()
            if isinstance(value, FunctionType)
        }

    def look(self, value: T) -> T:
        """Go on with this, perhaps after other threads."""
        world = World.running
        if world is not None and world.is_running_here() and world.random() < PARTS[world.seed % len(PARTS)]:
            frame = sys._getframe(1)
            if not self._is_looked_on(frame):
                world.switch(frame.f_code.co_name, frame.f_lineno)
        return value

    def _is_looked_on(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._eyes or frame.f_code.co_filename in _EYES:
                return True
            frame = frame.f_back
        return False


def _kinds(kind: type[T]) -> Iterator[type[T]]:
    yield kind
    for under in kind.__subclasses__():
        yield from _kinds(under)
