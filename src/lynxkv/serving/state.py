"""``/lynx/state``: every request of a router with what its workers know of it, as the page shows it."""

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from lynxkv.serving.router import RouterService
from lynxkv.serving.service import json_response
from lynxkv.serving.upstream import Worker

log = logging.getLogger(__name__)

_ANSWER_S = 1.0
_OF_PREFILL = frozenset({"queued", "prefill", "first_token"})
_FROM_DECODE = ("drafted", "accepted", "answer_tokens", "bytes", "choices")


def routes(service: RouterService) -> APIRouter:
    """The one route."""
    router = APIRouter(include_in_schema=False)

    @router.get("/lynx/state")
    async def state() -> Response:
        asked = [_requests(service.asking, worker) for worker in service.fleet.workers if _tells(worker)]
        told = await asyncio.gather(*asked)
        return json_response(merged(service, told))

    return router


def merged(service: RouterService, told: list[dict[str, Any]]) -> dict[str, Any]:
    """The router's own view, and each worker's moments put on its clock."""
    own = service.activity.plain()
    for request in own["requests"]:
        request["moments"] = [moment for moment in request["moments"] if moment["what"] != "queued"]
    by_id = {request["id"]: request for request in own["requests"]}
    for worker in told:
        ahead = worker["now"] - own["now"]  # of the worker's clock, and of its answer's way here
        for theirs in worker["requests"]:
            request = by_id.get(theirs["id"])
            if request is not None:
                _join(request, theirs, theirs["started"] - ahead - request["started"])
    for request in own["requests"]:
        request["moments"].sort(key=lambda moment: moment["at"])
        if request["ended_s"] is not None and not (request["finish"] or request["error"]):
            request["error"] = request["state"]
    return {
        "now": own["now"],
        "router": {"name": service.name, "draining": service.draining},
        "workers": [worker.plain() for worker in service.fleet.workers],
        "requests": own["requests"],
    }


def _join(request: dict[str, Any], theirs: dict[str, Any], later: float) -> None:
    of_prefill = theirs["role"] == "prefill"
    request["moments"] += [
        {**moment, "at": round(moment["at"] + later, 6)}
        for moment in theirs["moments"]
        if (moment["what"] in _OF_PREFILL) == of_prefill
    ]
    if of_prefill or theirs["transfer_id"] != request["transfer_id"]:  # an earlier attempt's figures do not count
        return
    request |= {name: theirs[name] for name in _FROM_DECODE}
    request["prompt_tokens"] = theirs["prompt_tokens"] or request["prompt_tokens"]
    if request["ended_s"] is None:
        request["state"] = theirs["state"]
    elif request["finish"]:
        request["finish"] = theirs["finish"] or request["finish"]


def _tells(worker: Worker) -> bool:
    return worker.up and worker.kind == "lynxkv"


async def _requests(client: aiohttp.ClientSession, worker: Worker) -> dict[str, Any]:
    """A worker's own; of one that does not answer soon, nothing."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            async with client.get(f"{worker.url}/lynx/requests") as response:
                if response.status == 200:
                    told: dict[str, Any] = msgspec.json.decode(await response.read())
                    return told
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        log.debug("%r does not tell its requests: %s", worker, error)  # whether it is up, its health says
    return {"now": 0.0, "requests": []}
