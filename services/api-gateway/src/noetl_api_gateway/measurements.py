"""Metrics that processes report here, for systems without a Prometheus to scrape them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer, as_is
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import plain_json_body, query
from noetl_core.store import metric
from noetl_core.store.component import kinds_meant
from noetl_core.store.metric import Sample
from noetl_core.wire import http

if TYPE_CHECKING:
    from asyncpg import Record

_FIRST = datetime(1, 1, 2, tzinfo=UTC)
_LAST = datetime(9999, 12, 30, tzinfo=UTC)


async def report(gateway: Gateway, request: Request) -> Response:
    asked = await plain_json_body(request, http.MetricsReport)
    samples = [
        Sample(
            one.name,
            one.value,
            msgspec.json.encode(one.labels).decode(),
            _in_calendar(one.reported_at),
        )
        for one in asked.metrics
    ]
    await metric.report(gateway.pool, samples, kind=asked.kind, component=asked.component)
    return answer(202, http.MetricsAccepted(accepted=len(samples)))


async def list_newest(gateway: Gateway, request: Request) -> Response:
    asked = query(request, http.MetricsQuery)
    rows = await metric.newest(
        gateway.pool,
        name=asked.name,
        component=asked.component,
        kinds=None if asked.kind is None else kinds_meant(asked.kind),
        since=_in_calendar(asked.since),
        until=_in_calendar(asked.until),
        before=asked.before,
        limit=asked.limit + 1,
    )
    shown = rows[: asked.limit]
    page = http.MetricPage(
        items=[_metric(row) for row in shown],
        next_before=str(shown[-1]["metric_id"]) if len(rows) > asked.limit else None,
    )
    return answer(200, page)


def _in_calendar(moment: datetime | None) -> datetime | None:
    """At the ends of the calendar another zone may have no such day, and Postgres thinks in UTC."""
    return None if moment is None else min(max(moment, _FIRST), _LAST)


def _metric(row: "Record") -> http.MetricView:
    return http.MetricView(
        name=row["name"],
        value=row["value"],
        labels=as_is(row["labels"]),
        reported_at=row["reported_at"],
    )


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/metrics/report",
        tag="runtime",
        summary="Report metrics of a process",
        handle=report,
        body=http.MetricsReport,
        answers={202: http.MetricsAccepted},
        problems=(400, 413, 415, 422),
    ),
    Endpoint(
        method="GET",
        path="/api/metrics/query",
        tag="runtime",
        summary="Read reported metrics from the newest to the oldest",
        handle=list_newest,
        query=http.MetricsQuery,
        answers={200: http.MetricPage},
        problems=(422,),
    ),
)
