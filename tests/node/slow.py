"""An engine whose prefill stops where a test wants it to."""

import threading


class SlowEngine:
    """Another engine whose prefill waits after ``chunks`` chunks (0: never) until ``go`` is set.

    Attributes
    ----------
    reached : threading.Event
        A prefill waits.
    prefills, chunks_done : int
        Prefills begun, and chunks of all of them.
    between : callable
        Called after every chunk.
    """

    def __init__(self, engine, chunks: int = 0) -> None:
        self._engine, self._chunks = engine, chunks
        self.go, self.reached = threading.Event(), threading.Event()
        self.prefills = self.chunks_done = 0
        self.between = lambda: None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, tokens, chunk):
        self.prefills += 1
        for i, step in enumerate(self._engine.prefill(tokens, chunk), 1):
            self.chunks_done += 1
            yield step
            self.between()
            if i == self._chunks and not self.go.is_set():
                self.reached.set()
                self.go.wait(60)
