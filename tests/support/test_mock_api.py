"""The mock API tells the truth, and fails as it was told to."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.mock_api import DATA_TYPES, Clinic, Trouble, running_mock_api

CLINIC = Clinic(facilities=2, patients=25)
TROUBLE = Trouble(rate_limited=0.3, broken=0.3, per_request_max=2)


@pytest.fixture(scope="module")
def quiet() -> Iterator[httpx.Client]:
    with running_mock_api(CLINIC) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def troubled() -> Iterator[httpx.Client]:
    with running_mock_api(CLINIC, TROUBLE) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def get(client: httpx.Client, path: str, **params: Any) -> Any:
    answer = client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_pages_of_patients_are_all_patients_in_order(quiet: httpx.Client) -> None:
    pages = [get(quiet, "/facilities/F02/patients", page=n, page_size=10) for n in (1, 2, 3)]

    found = [patient["patient_id"] for page in pages for patient in page["data"]]
    assert found == CLINIC.patient_ids("F02")
    assert [page["paging"]["hasMore"] for page in pages] == [True, True, False]


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_records_are_those_that_the_patient_announces(quiet: httpx.Client, data_type: str) -> None:
    patients = get(quiet, "/facilities/F01/patients", page_size=5)["data"]
    ids = ",".join(patient["patient_id"] for patient in patients)
    body = get(quiet, f"/facilities/F01/{data_type}", ids=ids)

    assert len(body["data"]) == sum(patient["expected"][data_type] for patient in patients)
    assert {r["patient_id"] for r in body["data"]} == {p["patient_id"] for p in patients}
    assert not body["paging"]["hasMore"]


def test_a_request_that_is_repeated_comes_through_before_its_limit(troubled: httpx.Client) -> None:
    for page in range(1, 21):
        query = {"page": page, "page_size": 1}
        tries = (troubled.get("/facilities/F01/patients", params=query) for _ in range(3))
        assert 200 in {answer.status_code for answer in tries}

    stats = get(troubled, "/stats")
    assert stats["429"] > 0
    assert stats["500"] > 0
    assert stats["answered"] == stats["429"] + stats["500"] + stats["200"] == 60


def test_trouble_is_the_same_in_every_order_of_requests() -> None:
    pages = list(range(1, 21))

    assert outcomes(pages) == dict(reversed(outcomes(pages[::-1]).items()))


def outcomes(pages: list[int]) -> dict[int, int]:
    with running_mock_api(CLINIC, TROUBLE) as url, httpx.Client(base_url=url, timeout=60) as client:
        path = "/facilities/F01/patients"
        return {page: client.get(path, params={"page": page}).status_code for page in pages}


def test_who_is_refused_for_coming_too_often_is_told_when_to_come_back() -> None:
    always = Trouble(rate_limited=1.0, per_request_max=1, retry_after_seconds=2)
    with running_mock_api(CLINIC, always) as url, httpx.Client(base_url=url, timeout=60) as client:
        refused, answered = client.get("/facilities"), client.get("/facilities")

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    assert answered.status_code == 200


def test_every_style_of_pages_gives_the_same_rows(quiet: httpx.Client) -> None:
    by_page = [get(quiet, "/paged/page", page=n)["data"] for n in (1, 2, 3, 4)]
    by_offset = [get(quiet, "/paged/offset", offset=n)["data"] for n in (0, 10, 20, 30)]
    by_cursor, cursor = [], "c0"
    while cursor:
        body = get(quiet, "/paged/cursor", cursor=cursor)
        cursor = body["next_cursor"]
        by_cursor.append(body["data"])

    assert by_page == by_offset == by_cursor
    assert [row["id"] for page in by_page for row in page] == list(range(35))


def test_a_flaky_page_fails_as_often_as_it_was_told_to(quiet: httpx.Client) -> None:
    path = "/paged/flaky?key=mine&page=2&failures=2"
    statuses = [quiet.get(path).status_code for _ in range(4)]

    assert statuses == [500, 500, 200, 200]


def test_endless_pages_always_have_one_more(quiet: httpx.Client) -> None:
    assert get(quiet, "/paged/endless", page=10_000)["paging"]["hasMore"]
