"""Who computes next: one forward pass at a time, in the order they were asked for."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from lynxkv.node.cancellation import Cancellation
from lynxkv.speculation import Logits, Session

T = TypeVar("T")


class Turns:
    """A lock that is handed on in the order it was asked for, so that everyone who works in steps goes on evenly.

    Two threads that compute at once would only take the cores from each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._ahead: deque[threading.Event] = deque()
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def turn(self, cancellation: Cancellation, *, ahead: bool = False) -> Iterator[None]:
        """Hold the turn; ``ahead`` goes before those who are not. :class:`Cancelled` ends the wait for it."""
        self._take(cancellation, ahead)
        try:
            yield
        finally:
            self._hand_on()

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        with self._lock:
            return len(self._ahead) + len(self._waiting)

    def _take(self, cancellation: Cancellation, ahead: bool) -> None:
        cancellation.check()
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            (self._ahead if ahead else self._waiting).append(mine)
        try:
            with cancellation.waking(mine.set):
                mine.wait()
                cancellation.check()
        except BaseException:  # an interrupt too: a turn handed to nobody would stop everyone
            self._leave(mine)
            raise

    def _leave(self, mine: threading.Event) -> None:
        with self._lock:
            for queue in (self._ahead, self._waiting):
                if mine in queue:
                    queue.remove(mine)
                    return
        self._hand_on()

    def _hand_on(self) -> None:
        with self._lock:
            queue = self._ahead or self._waiting
            if queue:
                queue.popleft().set()
            else:
                self._taken = False


def in_turns(steps: Iterator[T], turns: Turns, cancellation: Cancellation) -> Iterator[T]:
    """``steps``, each of them made in a turn of its own."""
    while True:
        with turns.turn(cancellation):
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step


class SessionInTurns:
    """A session whose forward passes each wait their turn; the first one goes ahead, for it is what a user waits for.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session, turns: Turns, cancellation: Cancellation) -> None:
        self._session, self._turns, self._cancellation = session, turns, cancellation
        self._first = True

    @property
    def length(self) -> int:
        """Tokens whose KV the session holds."""
        return self._session.length

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append ``tokens`` in a turn; see :class:`lynxkv.speculation.Session`."""
        with self._turns.turn(self._cancellation, ahead=self._first):
            self._first = False
            return self._session.forward(tokens)

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        self._session.truncate(length)
