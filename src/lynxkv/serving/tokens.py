"""Between text and tokens: what a worker's engine makes of a request's prompt."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from lynxkv.engine.base import Engine
from lynxkv.errors import RequestError
from lynxkv.serving.ask import Ask


class Tokens:
    """An engine's tokenizer, used by one thread at a time so that long prompts do not stop the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(cancel_futures=True)

    async def of(self, ask: Ask) -> list[int]:
        """The prompt's ids. RequestError or PromptTooLong for one that cannot be run with at least one token."""
        tokens = await asyncio.get_running_loop().run_in_executor(self._worker, self._encode, ask)
        self._engine.check_prompt(tokens, 1)
        return tokens

    def room(self, tokens: list[int], ask: Ask) -> int:
        """Tokens of the answer: as many as asked for, or the default as far as the context has room."""
        if ask.max_tokens is not None:
            self._engine.check_prompt(tokens, ask.max_tokens)
            return ask.max_tokens
        return min(ask.params.max_tokens, self._engine.context - len(tokens))

    def spell(self, token: int) -> str:
        """A token's own text."""
        return self._engine.decode([token]) if self._engine.has_text else ""

    def _encode(self, ask: Ask) -> list[int]:
        if isinstance(ask.prompt, str):
            tokens = self._engine.encode(ask.prompt)
        elif isinstance(ask.prompt[0], int):
            tokens = [token for token in ask.prompt if isinstance(token, int)]
        else:
            if not self._engine.has_text:
                raise RequestError("this model has no tokenizer: send token ids to /v1/completions")
            tokens = self._engine.chat([turn for turn in ask.prompt if isinstance(turn, dict)])
        return tokens
