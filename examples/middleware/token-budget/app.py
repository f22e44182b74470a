"""A budget of tokens for each tenant and day, kept in the store. Config: {"tokens": 100000}."""

import json

from wit_world import exports
from wit_world.imports import host
from wit_world.imports.types import (
    Event,
    EventAction,
    EventAction_Continue,
    Header,
    Needs,
    Reply,
    Request,
    RequestAction,
    RequestAction_Continue,
    RequestAction_Reject,
    Response,
    ResponseAction,
    ResponseAction_Continue,
)

DAY_MS = 24 * 60 * 60 * 1000


def key(request: Request) -> str:
    return f"{request.tenant or 'nobody'}/{host.now_ms() // DAY_MS}"


def spend(request: Request, usage: dict | None) -> None:
    tokens = int((usage or {}).get("total_tokens", 0))
    if tokens > 0:
        total = host.kv_add(key(request), tokens, DAY_MS)
        host.counter_add("tokens", request.tenant or "nobody", tokens)
        host.log(host.Level.INFO, f"{request.tenant or 'nobody'} has used {total} tokens today")


class About(exports.About):
    def describe(self) -> Needs:
        return Needs(request_body=False, response_body=True)


class OnRequest(exports.OnRequest):
    def handle(self, request: Request) -> RequestAction:
        budget = int(json.loads(host.config() or "{}").get("tokens", 100_000))
        if host.kv_add(key(request), 0, DAY_MS) < budget:
            return RequestAction_Continue()
        error = {"error": {"message": "today's token budget is used up", "type": "rate_limit_error"}}
        headers = [Header("content-type", "application/json"), Header("retry-after", "3600")]
        return RequestAction_Reject(Reply(status=429, headers=headers, body=json.dumps(error).encode()))


class OnResponse(exports.OnResponse):
    def handle(self, request: Request, response: Response) -> ResponseAction:
        if response.body:
            try:
                spend(request, json.loads(response.body).get("usage"))
            except (ValueError, AttributeError):
                pass
        return ResponseAction_Continue()


class OnStreamEvent(exports.OnStreamEvent):
    def handle(self, request: Request, event: Event) -> EventAction:
        # Only the last event has it, if the client asked for usage.
        if '"total_tokens"' in event.data:
            try:
                spend(request, json.loads(event.data).get("usage"))
            except (ValueError, AttributeError):
                pass
        return EventAction_Continue()
