"""A connection to etcd's JSON gateway: flights of requests, each over by its deadline; endpoints, TLS and login.

A *flight* is one or more HTTP/1.1 requests sent in one go; etcd serves them in their order, so a flight costs one round
trip, and what a request does is seen by those behind it. A gRPC refusal of a request comes back as ``Refusal`` where it
is an answer (a lease that is gone), else as one of dibs's errors, told apart by gRPC's code.

The framing is done here, on a socket that never blocks, because the kept HTTP libraries cannot do two things that this
store needs: end at a deadline whatever trickles in (their time-outs are per read), and send a request before the last
was answered. A serializable read of a missing key takes 0.26 ms this way, 0.42 ms through http.client, 0.53 ms through
urllib3, and 1.05 ms through requests, which etcd3gw uses; through gRPC, 0.34 ms (etcd 3.4, one machine, medians).
"""

from __future__ import annotations

import json
import ssl
from contextlib import closing, suppress

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.stores.etcd_wire import Wire, reach
from dibs.stores.greetings import heard, speaks_tls, was_cut
from dibs.stores.parts import ONE_OF_SEVERAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dibs.clock import Deadline
    from dibs.stores.etcd_address import Access

API = "/v3/"
# How long an interrupted caller waits for the answers to what it sent.
FINISH_S = 0.5
# How long a server is listened to that may want a certificate, and says so behind the handshake.
LISTEN_S = 0.5

# gRPC's codes, as far as they are told apart here.
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED = 3, 5, 7, 8
FAILED_PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 9, 11, 16
# Refused before anything was done.
_NOT_APPLIED = {INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED, OUT_OF_RANGE, UNAUTHENTICATED}
# What etcd says when a request is greater than it takes, and what it takes as shipped.
_LIMITS = {
    "too many operations in txn request": "--max-txn-ops (128 as shipped)",
    "request is too large": "--max-request-bytes (1.5 MiB as shipped)",
}
# The gateway's own answer where nothing speaks its language: no code at all.
_FOREIGN = -1


class Refusal(NamedTuple):
    """What etcd said instead of doing what it was asked."""

    code: int
    text: str


class NoSpace(StoreUnavailable):
    """Refused because space, or the room for requests, is used up."""


class Gateway:
    """Sends flights over one connection, which is opened when it is needed; used by one thread at a time."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._at = 0  # which endpoint; the next one after a failure
        self._wire: Wire | None = None
        self._was_silent = False  # the last flight was not answered in its time
        self._token = ""
        self._heads: dict[str, str] = {}

    # -- asking ---------------------------------------------------------------------------------------------------

    def one(self, path: str, body: str, deadline: Deadline) -> Any:
        """A flight of a single request; its answer."""
        return self.flight([(path, body)], deadline)[0]

    def one_or_refusal(self, path: str, body: str, deadline: Deadline) -> Any:
        """The same, where a refusal says what was asked."""
        self.open(deadline)
        return self._exchange([(path, body)], deadline)[0]

    def flight(self, asked: Sequence[tuple[str, str]], deadline: Deadline) -> list[Any]:
        """Send these requests (path, JSON) in one go; their answers in order.

        An answer is the decoded JSON, for a stream (keepalive) the list of its messages, or a Refusal for what is not
        there (NOT_FOUND). Any other refusal is raised, and so is everything that went wrong on the way.
        """
        self.open(deadline)
        answers = self._exchange(asked, deadline)
        if self._access.user and all(
            type(answer) is Refusal and answer.code in (UNAUTHENTICATED, INVALID_ARGUMENT) for answer in answers
        ):
            # Logins end, and are void when users or roles were changed meanwhile; or there was none, because
            # authentication was off, or the password another. Nothing was done: once more.
            self._log_in(deadline)
            answers = self._exchange(asked, deadline)
        for answer in answers:
            if type(answer) is Refusal and answer.code != NOT_FOUND:
                raise self._error(answer, alone=len(answers) == 1)
        if not self._access.known_good:  # from now on a failure is an outage, not a wrong address
            self._access.known_good.append(True)
        return answers

    def text(self, path: str, deadline: Deadline) -> str:
        """GET of a page that is no JSON (the metrics); empty where there is none."""
        self.open(deadline)
        status, body = self._answers([f"GET {path} HTTP/1.1\r\nHost: etcd\r\n\r\n"], deadline)[0]
        return body.decode("utf-8", "replace") if status == 200 else ""

    def stream(self, path: str, body: str, deadline: Deadline) -> Wire:
        """A new connection on which a request was sent whose answer does not end (a watch); it is the caller's."""
        if self._access.user:
            self.open(deadline)  # which logs in
        wire = self._connect(deadline)
        try:
            # It says that it is the last. Otherwise Go's server, when it begins to answer, throws away what it has not
            # read of the request: etcd would watch the first keys, and never hear of the others.
            framed = self._framed(path, body).replace("\r\n", "\r\nConnection: close\r\n", 1)
            unsent = memoryview(framed.encode())
            while unsent := wire.give(unsent):
                if not wire.ready.writable(deadline.remaining()):
                    raise StoreUnavailable("etcd did not take the request in time")
        except OSError as error:
            wire.close()
            raise StoreUnavailable(f"etcd: {error}") from error
        except BaseException:
            wire.close()
            raise
        return wire

    def _exchange(self, asked: Sequence[tuple[str, str]], deadline: Deadline) -> list[Any]:
        answers = self._answers([self._framed(path, body) for path, body in asked], deadline)
        return [decoded(path, status, body) for (path, _), (status, body) in zip(asked, answers, strict=True)]

    def _answers(self, framed: list[str], deadline: Deadline) -> list[tuple[int, bytes]]:
        wire = self._wire
        assert wire is not None
        answers: list[tuple[int, bytes]] = []
        try:
            self._converse(wire, memoryview("".join(framed).encode()), len(framed), answers, deadline, self._silence())
            self._was_silent = False
            return answers
        except (OSError, ValueError) as error:  # a socket's or TLS's, or what is no HTTP
            self._was_silent = isinstance(error, TimeoutError)
            text = f"etcd at {self._shown()}: {error}"
            self.close()
            wrong = not self._access.known_good and not answers and self._misled(error, deadline)
            self.drop()
            raise (SetupRequired(f"{text}. {_ABOUT_TLS}") if wrong else StoreUnavailable(text)) from error
        except BaseException:
            # Ctrl-C. etcd is at work on it; were it done after the release that follows on another connection, the
            # name would stay granted to nobody. So let it finish first, if it is quick.
            try:
                self._converse(wire, memoryview(b""), len(framed), answers, deadline.within(FINISH_S))
            except (OSError, ValueError):  # StoreUnavailable among them
                pass
            finally:
                self.close()
            raise

    def _misled(self, error: Exception, deadline: Deadline) -> bool:
        """Whether the server that let us down wants TLS, none, or a certificate; the error alone does not tell."""
        if not was_cut(error):
            return isinstance(error, ssl.SSLError)
        server = self._server()
        if self._access.tls is None:
            return speaks_tls(server, deadline)
        # (Not any HTTP: some servers that want TLS say so in plain HTTP, by a refusal.)
        if heard(server, b"GET /version HTTP/1.0\r\n\r\n", deadline).startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")):
            return True
        try:  # What refuses us comes behind the handshake; had we sent something, the end might overtake it.
            with closing(reach(*server, self._access.tls, deadline)) as wire:
                while wire.ready.readable(min(LISTEN_S, deadline.remaining())):
                    wire.take()
        except OSError as refusal:
            return isinstance(refusal, ssl.SSLError) and not was_cut(refusal)
        return False

    def _silence(self) -> float:
        """The part of its time for which a member may say nothing: one of several leaves some for the next.

        But not two in turn, or what is slow, and not away, would never be done. (A member that hung up was not silent:
        a leader that dies does, and the next member is without one for a second or two.)
        """
        return 1.0 if len(self._access.endpoints) == 1 or self._was_silent else ONE_OF_SEVERAL

    def _converse(
        self,
        wire: Wire,
        unsent: memoryview,
        count: int,
        answers: list[tuple[int, bytes]],
        deadline: Deadline,
        silence: float = 1.0,
    ) -> None:
        """Send, and read until as many answers are there. What arrives is read while there is more to send."""
        limit = deadline.within(deadline.remaining() * silence)
        while True:
            if unsent:
                unsent = wire.give(unsent)
            while (answer := wire.answer()) is not None:
                answers.append(answer)
            if len(answers) >= count:
                return
            if wire.take():
                limit = deadline
                continue
            left = limit.remaining()
            if not (wire.ready.writable(left) if unsent else wire.ready.readable(left)):
                raise TimeoutError("no answer in time")

    def _framed(self, path: str, body: str) -> str:
        head = self._heads.get(path)
        if head is None:
            login = f"Authorization: {self._token}\r\n" if self._token else ""
            head = self._heads[path] = f"POST {API}{path} HTTP/1.1\r\nHost: etcd\r\n{login}Content-Length: "
        # Everything that is not ASCII travels as base64, so characters are bytes.
        return f"{head}{len(body)}\r\n\r\n{body}"

    # -- connecting -----------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> None:
        """Connect and log in where that has not been done, or where the server has closed an idle connection."""
        wire = self._wire
        if wire is not None:
            try:
                if not wire.take():
                    return
            except OSError:
                pass
            self.close()
        self._wire = self._connect(deadline)
        if self._access.user and not self._token:
            try:
                self._log_in(deadline)
            except BaseException:
                self.close()
                raise

    def _log_in(self, deadline: Deadline) -> None:
        self._token = ""
        self._heads.clear()
        body = json.dumps({"name": self._access.user, "password": self._access.password})
        answer = self._exchange([("auth/authenticate", body)], deadline)[0]
        if type(answer) is not Refusal:
            self._token = answer["token"]
            self._heads.clear()
        elif answer.code == INVALID_ARGUMENT:
            raise SetupRequired(f"etcd at {self._shown()}: {answer.text}. Check user and password in the URL")
        elif answer.code != FAILED_PRECONDITION:  # where authentication is not enabled, nobody needs a login
            raise self._error(answer, alone=True)

    def _connect(self, deadline: Deadline) -> Wire:
        """A connection to the first endpoint that takes one, beginning with the one that served last."""
        endpoints = self._access.endpoints
        troubles = []
        for tries_left in range(len(endpoints), 0, -1):
            try:
                part = deadline.within(deadline.remaining() / tries_left)
                wire = reach(*self._server(), self._access.tls, part)
                if len(endpoints) > 1:
                    self._hear(wire, part)
                return wire
            except OSError as error:
                if self._access.tls and not self._access.known_good and self._misled(error, deadline):
                    raise SetupRequired(f"etcd at {self._shown()}: no TLS connection: {error}. {_ABOUT_TLS}") from error
                troubles.append(f"{self._shown()}: {error}")
                self._at += 1
        raise StoreUnavailable(f"etcd cannot be reached ({'; '.join(troubles)})", maybe_applied=False)

    def _hear(self, wire: Wire, deadline: Deadline) -> None:
        """Let a member say something, whatever it is: the system takes connections also to one that is frozen."""
        try:
            with suppress(ValueError):  # of what is no HTTP the first request tells
                self._converse(wire, memoryview(b"GET /version HTTP/1.1\r\nHost: etcd\r\n\r\n"), 1, [], deadline)
        except BaseException:
            wire.close()
            raise

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def forget_login(self) -> None:
        """Close the connection and log in anew for the next one."""
        self._token = ""
        self._heads.clear()
        self.close()

    def drop(self) -> None:
        """Close the connection and go to the next endpoint for the next one."""
        self.close()
        self._at += 1

    def _server(self) -> tuple[str, int]:
        return self._access.endpoints[self._at % len(self._access.endpoints)]

    def _shown(self) -> str:
        host, port = self._server()
        return f"{host}:{port}"

    def _error(self, refusal: Refusal, *, alone: bool) -> Exception:
        """The error for a refusal; ``alone``: nothing else was sent with it that may have been done."""
        text = f"etcd at {self._shown()}: {refusal.text}"
        if refusal.code == _FOREIGN:
            if self._access.known_good:
                self.drop()
                return StoreUnavailable(text)
            self.close()
            return SetupRequired(f"{text}. Is that etcd's client port, its JSON gateway on? With TLS write etcds://")
        # What is too much has the code of a login that is void, so here the words have to tell.
        limit = next((limit for words, limit in _LIMITS.items() if words in refusal.text), None)
        if refusal.code == INVALID_ARGUMENT and limit is not None:
            return SetupRequired(f"{text}. Raise {limit} of the servers")
        if refusal.code in (UNAUTHENTICATED, INVALID_ARGUMENT) and self._access.user and not alone:
            self.forget_login()  # only some of the flight needed it: the next one logs in
            return StoreUnavailable(text)
        if refusal.code in (PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT):
            return SetupRequired(f"{text}. Check the login in the URL, and its rights on the prefix")
        if refusal.code == RESOURCE_EXHAUSTED:
            return NoSpace(f"{text} (`dibs doctor` says whether its space is used up)", maybe_applied=not alone)
        if refusal.code not in _NOT_APPLIED:
            self.drop()  # a member without a leader: another may have one
        return StoreUnavailable(text, maybe_applied=not alone or refusal.code not in _NOT_APPLIED)


_ABOUT_TLS = "Check whether the port speaks TLS (etcds://) or not (etcd://), and ca=, cert= and key= in the URL"


def decoded(path: str, status: int, body: bytes) -> Any:
    """An answer as Python's values, or the refusal in it."""
    try:
        if path == "lease/keepalive" and status == 200:
            messages = list(lines_of(body))
            for message in messages:
                if "error" in message:
                    return _refusal(message["error"])
            return [message["result"] for message in messages]
        answer = json.loads(body)
        return answer if status == 200 else _refusal(answer)
    except (ValueError, KeyError, TypeError):
        said = " ".join(body[:200].decode("utf-8", "replace").split())
        return Refusal(_FOREIGN, f"it answered {status} and no JSON: {said!r}")


def lines_of(body: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a stream, one a line."""
    for line in body.splitlines():
        if line:
            yield json.loads(line)


def _refusal(said: dict[str, Any]) -> Refusal:
    """What gateways of all versions say: 3.6 has no ``error``, streams have ``grpc_code``."""
    code = said.get("grpc_code", said.get("code"))
    text = said.get("message") or said.get("error") or "refused"
    return Refusal(int(code) if code is not None else _FOREIGN, str(text))
