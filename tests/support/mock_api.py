"""A clinic's API in a process of its own: known rows, page by page, and trouble now and then.

GET /facilities                                          the facilities
GET /facilities/{f}/patients?page=&page_size=            their patients, and what to expect of each
GET /facilities/{f}/{data_type}?ids=a,b&page=&page_size= the records of these patients
GET /paged/{style}?total=&page_size=                     rows 0..total-1, to practise pagination on
GET /stats                                               what was answered so far, by outcome

Rows depend on nothing but where they stand, and trouble on nothing but the seed, the request and
how often it came: the order in which requests arrive changes neither.
"""

import argparse
import asyncio
import logging
import signal
import socket
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from hypercorn.asyncio import serve
from hypercorn.config import Config as HypercornConfig
from hypercorn.typing import ASGIFramework
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

DATA_TYPES = ("assessments", "conditions", "medications", "observations", "vital_signs")
RECORDS_PER_PATIENT_MAX = 3
PAGE_SIZE_MAX = 1000
HOST = "127.0.0.1"
_STOP_SECONDS = 60.0


class Trouble(NamedTuple):
    """Which part of the requests goes wrong, each kind for itself, and how often one at most."""

    rate_limited: float = 0.0
    broken: float = 0.0
    slow: float = 0.0
    per_request_max: int = 3
    """After this many faults the same request is answered, so enough attempts always do."""
    slow_ms_min: int = 50
    slow_ms_max: int = 300
    retry_after_seconds: int = 1


class Clinic(NamedTuple):
    """What there is. The test asks the same functions that the API answers from."""

    facilities: int = 10
    patients: int = 1000
    seed: int = 1

    def facility_ids(self) -> list[str]:
        return [f"F{number:02}" for number in range(1, self.facilities + 1)]

    def patient_ids(self, facility: str) -> list[str]:
        return [f"{facility}-P{number:05}" for number in range(1, self.patients + 1)]

    def patient(self, facility: str, patient: str) -> dict[str, Any]:
        expected = {kind: len(self.records(patient, kind)) for kind in DATA_TYPES}
        return {"facility_id": facility, "patient_id": patient, "expected": expected}

    def records(self, patient: str, data_type: str) -> list[dict[str, Any]]:
        """Between one and three: a patient without records could not be told from a lost one."""
        count = 1 + self._number(patient, data_type) % RECORDS_PER_PATIENT_MAX
        return [
            {
                "record_id": f"{patient}-{data_type}-{number}",
                "facility_id": patient.partition("-")[0],
                "patient_id": patient,
                "data_type": data_type,
                "value": self._number(patient, data_type, number) % 1000,
            }
            for number in range(count)
        ]

    def _number(self, *parts: object) -> int:
        return number_of(self.seed, *parts)


def number_of(*parts: object) -> int:
    """A number that looks random and is always the same."""
    return zlib.crc32("/".join(map(str, parts)).encode())


class MockApi:
    def __init__(self, clinic: Clinic, trouble: Trouble) -> None:
        self.clinic = clinic
        self.trouble = trouble
        self.outcomes: Counter[str] = Counter()
        self._times: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/stats", self._stats),
                Route("/facilities", self._troubled(self._facilities)),
                Route("/facilities/{facility}/patients", self._troubled(self._patients)),
                Route("/facilities/{facility}/{data_type}", self._troubled(self._records)),
                Route("/paged/{style}", self._paged),
            ]
        )

    async def _stats(self, _: Request) -> Response:
        answered = sum(count for outcome, count in self.outcomes.items() if outcome != "slow")
        return JSONResponse({"answered": answered, **self.outcomes})

    def _troubled(
        self, answer: Callable[[Request], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            what = f"{request.url.path}?{request.url.query}"
            self._times[what] += 1
            fault = self._fault(what)
            if fault is not None:
                return fault
            if self._happens("slow", what, self.trouble.slow):
                self.outcomes["slow"] += 1
                await asyncio.sleep(self._slow_seconds(what))
            response = answer(request)
            self.outcomes[str(response.status_code)] += 1
            return response

        return endpoint

    def _fault(self, what: str) -> Response | None:
        if self._faults[what] >= self.trouble.per_request_max:
            return None
        for status, rate in ((429, self.trouble.rate_limited), (500, self.trouble.broken)):
            if self._happens(str(status), what, rate):
                self._faults[what] += 1
                self.outcomes[str(status)] += 1
                return self._refusal(status)
        return None

    def _refusal(self, status: int) -> Response:
        retry_after = {"Retry-After": str(self.trouble.retry_after_seconds)}
        headers = retry_after if status == 429 else {}
        return JSONResponse({"error": "try again"}, status_code=status, headers=headers)

    def _happens(self, kind: str, what: str, rate: float) -> bool:
        return number_of(self.clinic.seed, kind, what, self._times[what]) % 10_000 < rate * 10_000

    def _slow_seconds(self, what: str) -> float:
        trouble = self.trouble
        spread = trouble.slow_ms_max - trouble.slow_ms_min + 1
        return (trouble.slow_ms_min + number_of(what, self._times[what]) % spread) / 1000

    async def _paged(self, request: Request) -> Response:
        """35 rows by ten unless told otherwise, in the style that the path names."""
        style, query = request.path_params["style"], Query(request)
        if style not in STYLES:
            return _not_found(f"there is no style {style}")
        if style == "flaky" and self._is_flaky_now(query):
            return self._refusal(500)
        rows = [{"id": n, "square": n * n} for n in range(query.number("total", 35))]
        return JSONResponse(STYLES[style](rows, query, size=10))

    def _is_flaky_now(self, query: "Query") -> bool:
        """Page `flaky_page` fails `failures` times; `key` tells one reader from another."""
        page = query.number("page", 1)
        what = f"flaky/{query.text('key')}/{page}"
        if page != query.number("flaky_page", 2) or self._faults[what] >= query.number(
            "failures", 2
        ):
            return False
        self._faults[what] += 1
        self.outcomes["500"] += 1
        return True

    def _facilities(self, _: Request) -> Response:
        return JSONResponse({"data": [{"facility_id": f} for f in self.clinic.facility_ids()]})

    def _patients(self, request: Request) -> Response:
        facility = request.path_params["facility"]
        if facility not in self.clinic.facility_ids():
            return _not_found(f"there is no facility {facility}")
        ids = self.clinic.patient_ids(facility)
        body = by_page(ids, Query(request), size=PAGE_SIZE_MAX)
        body["data"] = [self.clinic.patient(facility, patient) for patient in body["data"]]
        return JSONResponse(body)

    def _records(self, request: Request) -> Response:
        data_type = request.path_params["data_type"]
        if data_type not in DATA_TYPES:
            return _not_found(f"there is no data type {data_type}")
        ids = [patient for patient in Query(request).text("ids").split(",") if patient]
        if not ids:
            return JSONResponse({"error": "`ids` is missing"}, status_code=400)
        records = [record for patient in ids for record in self.clinic.records(patient, data_type)]
        return JSONResponse(by_page(records, Query(request), size=PAGE_SIZE_MAX))


class Query:
    """The query of a request, as what it should be."""

    def __init__(self, request: Request) -> None:
        self._params = request.query_params

    def text(self, name: str, default: str = "") -> str:
        return self._params.get(name, default)

    def number(self, name: str, default: int) -> int:
        return int(self.text(name, str(default)))

    def size(self, default: int) -> int:
        return max(1, min(self.number("page_size", default), PAGE_SIZE_MAX))


def by_page(rows: list[Any], query: Query, *, size: int) -> dict[str, Any]:
    page, size = query.number("page", 1), query.size(size)
    first = (page - 1) * size
    more = first + size < len(rows)
    paging = {"page": page, "pageSize": size, "total": len(rows), "hasMore": more}
    return {"data": rows[first : first + size], "paging": paging}


def by_offset(rows: list[Any], query: Query, *, size: int) -> dict[str, Any]:
    offset, size = query.number("offset", 0), query.size(size)
    paging = {"offset": offset, "limit": size, "hasMore": offset + size < len(rows)}
    return {"data": rows[offset : offset + size], "paging": paging}


def by_cursor(rows: list[Any], query: Query, *, size: int) -> dict[str, Any]:
    first, size = int(query.text("cursor", "c0").removeprefix("c")), query.size(size)
    following = f"c{first + size}" if first + size < len(rows) else None
    return {"data": rows[first : first + size], "next_cursor": following}


def endlessly(rows: list[Any], query: Query, *, size: int) -> dict[str, Any]:
    """Says that there is more however far one reads: for limits."""
    page = query.number("page", 1)
    row = {"id": page, "square": page * page}
    return {"data": [row], "paging": {"page": page, "hasMore": True}}


STYLES = {
    "page": by_page,
    "flaky": by_page,
    "offset": by_offset,
    "cursor": by_cursor,
    "endless": endlessly,
}


def _not_found(message: str) -> Response:
    return JSONResponse({"error": message}, status_code=404)


@contextmanager
def running_mock_api(clinic: Clinic | None = None, trouble: Trouble | None = None) -> Iterator[str]:
    """Its address, once it listens. In a process of its own: it must not wait for the test."""
    clinic, trouble = clinic or Clinic(), trouble or Trouble()
    options = {**clinic._asdict(), **trouble._asdict()}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "support.mock_api", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready: "), line
            yield line.removeprefix("ready: ").strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_STOP_SECONDS)


async def _serve(api: MockApi) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    listener = socket.create_server((HOST, 0), backlog=1024)
    print(f"ready: http://{HOST}:{listener.getsockname()[1]}", flush=True)

    settings = HypercornConfig()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.graceful_timeout = 0.1
    settings.keep_alive_max_requests = 1_000_000

    async def until_stopped() -> None:
        await stopping.wait()

    await serve(cast("ASGIFramework", api.app()), settings, shutdown_trigger=until_stopped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for part in (Clinic(), Trouble()):
        for name, default in part._asdict().items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    told = vars(parser.parse_args())
    clinic = Clinic(**{name: told[name] for name in Clinic._fields})
    trouble = Trouble(**{name: told[name] for name in Trouble._fields})
    asyncio.run(_serve(MockApi(clinic, trouble)))


if __name__ == "__main__":
    main()
