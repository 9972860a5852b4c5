"""The page at ``/ui``: static files, no build step, nothing from elsewhere."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> APIRouter:
    """``/ui/`` and its files, read once; ``/ui`` leads there. They hold no data, so they need no key."""
    router = APIRouter(include_in_schema=False)
    contents = {
        each.name: (each.read_bytes(), _TYPES[each.name.rpartition(".")[2]])
        for each in files(__name__).iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }

    @router.get("/ui")
    def without_slash() -> Response:
        return RedirectResponse("/ui/")

    @router.get("/ui/{name}")
    @router.get("/ui/")
    def file(name: str = "index.html") -> Response:
        if name not in contents:
            return Response(status_code=404, headers=_HEADERS)
        body, media_type = contents[name]
        return Response(body, media_type=media_type, headers=_HEADERS)

    return router
