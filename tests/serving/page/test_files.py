"""How the page's files are served."""

import re
from importlib.resources import files

from lynxkv.serving import page
from serving.apps import ask


def test_ui_leads_to_the_page_and_its_policy_lets_nothing_else_in(stage):
    _, url = stage
    status, headers, _ = ask(url, "/ui")
    assert (status, headers["location"]) == (307, "/ui/")
    status, headers, body = ask(url, "/ui/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>lynxkv</title>" in body
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}


def test_every_file_that_the_page_names_is_there_and_none_is_elsewhere(stage):
    _, url = stage
    for name in (each.name for each in files(page).iterdir() if re.search(r"\.(html|css|js)$", each.name)):
        text = ask(url, f"/ui/{name}")[2].decode()
        assert not re.search(r"https?:|//[a-z]+\.", re.sub(r"^\s*(//|/?\*).*$", "", text, flags=re.M)), name
        for found in re.findall(r'(?:href|src|from)[ =]*"([\w./-]+)"|url\("([^"]+)"\)', text):
            other = next(filter(None, found)).removeprefix("./")
            assert ask(url, f"/ui/{other}")[0] == 200, f"{other} of {name}"


def test_what_is_no_file_of_the_page_is_not_found(stage):
    _, url = stage
    for name in ("__init__.py", "nothing.js", "..%2f__init__.py"):
        assert ask(url, f"/ui/{name}")[0] == 404
