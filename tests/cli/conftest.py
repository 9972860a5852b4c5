import pytest

from cli.commands import prefill, save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a tiny model that reads and writes bytes."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def document(tmp_path_factory):
    """A text of some hundred bytes."""
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; αβγ, and over 12 others. " * 9, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def peer(tiny):
    """Address of a running prefill process."""
    with prefill(tiny) as (_, address):
        yield address
