"""The live feed over HTTP."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.web.requests import Parameter
from holdfast.web.routing import ApiRoute, Asked
from holdfast.web.sse import EventStreamResponse

PATIENCE_SECONDS = 30.0


async def follow_feed(asked: Asked) -> Response:
    feed = asked.feed
    assert feed is not None
    who = asked.principal.name
    asked.streams.admit(who)
    topics = feed.asked(asked.query["topics"] or "", asked.streams.topics_of(who))
    batches = feed.follow(topics, asked.request.headers.get("last-event-id"))
    return EventStreamResponse(batches, asked.streams, patience_seconds=PATIENCE_SECONDS, who=who, topics=topics)


ROUTES = (
    ApiRoute(
        "GET",
        "/live",
        follow_feed,
        "follow which topics change, as server-sent events",
        {"topics": Parameter("the topics, with spaces or commas between")},
        is_stream=True,
    ),
)
