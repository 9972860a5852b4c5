"""Long prompts from text that every Python installation has: its own documentation."""

import importlib
import pydoc
import re
from pathlib import Path

from lynxkv.engine.base import Engine
from lynxkv.errors import RequestError

MODULES = (
    "argparse", "asyncio", "collections", "concurrent.futures", "configparser", "csv", "datetime", "decimal",
    "difflib", "email.message", "enum", "fractions", "functools", "gzip", "hashlib", "heapq", "html.parser",
    "http.client", "imaplib", "inspect", "io", "ipaddress", "itertools", "json", "logging", "mailbox",
    "multiprocessing", "optparse", "os", "pathlib", "pickle", "random", "re", "sched", "shutil", "smtplib",
    "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "typing", "unittest", "urllib.request", "uuid", "xml.dom.minidom", "zipfile",
)  # fmt: skip

_PLAIN = pydoc._PlainTextDoc()  # type: ignore[attr-defined]  # what pydoc.plaintext is, by its typed name

QUESTION = "Explain in a few sentences what the text above documents and how it is used."


def pydoc_text(first: int = 0, modules: int = 6) -> str:
    """The ``pydoc`` pages of some modules of the standard library, starting with module number ``first``."""
    pages = []
    for i in range(modules):
        module = importlib.import_module(MODULES[(first + i) % len(MODULES)])
        pages.append(pydoc.render_doc(module, renderer=_PLAIN))
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(pages))  # addresses differ from run to run


def read_document(path: Path) -> str:
    """Text of a file; RequestError says why it could not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"a readable UTF-8 text file expected at {path}: {error}") from error


def long_prompt(engine: Engine, document: str, question: str, tokens: int) -> list[int]:
    """A chat turn of at most ``tokens`` tokens: the head of ``document``, then ``question``.

    Raises
    ------
    RequestError
        There is no room for any of the document.
    """
    room = tokens - len(engine.chat(f"\n\n{question}"))
    if room < 1:
        raise RequestError(f"{tokens} tokens leave no room for a document beside this question; ask for more tokens")
    head = engine.encode(document)
    while True:
        prompt = engine.chat(f"{engine.decode(head[:room])}\n\n{question}")
        if len(prompt) <= tokens:
            return prompt
        room -= len(prompt) - tokens
