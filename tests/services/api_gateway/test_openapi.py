"""The description of the API is made from the API."""

from pathlib import Path

import yaml

from noetl_api_gateway.app import ENDPOINTS
from noetl_api_gateway.print_openapi import openapi_yaml
from services.api_gateway.conftest import Client

OPENAPI = Path(__file__).parents[3] / "schema" / "openapi.yaml"


def test_the_document_in_the_repository_is_the_one_the_code_makes() -> None:
    assert OPENAPI.read_text() == openapi_yaml(), (
        "run: python -m noetl_api_gateway.print_openapi > schema/openapi.yaml"
    )


async def test_the_gateway_serves_the_same_document(client: Client) -> None:
    served = (await client.get("/openapi.json")).json()

    assert served == yaml.safe_load(OPENAPI.read_text())


def test_every_reference_in_the_document_leads_somewhere() -> None:
    document = yaml.safe_load(OPENAPI.read_text())
    schemas = document["components"]["schemas"]

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        if isinstance(node, list):
            return [found for value in node for found in references(value)]
        return []

    found = references(document)
    assert found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)


def test_operation_ids_are_unique() -> None:
    document = yaml.safe_load(OPENAPI.read_text())
    ids = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]

    assert len(ids) == len(set(ids)) == len(ENDPOINTS)


async def test_the_page_for_people_lists_every_endpoint_and_loads_nothing_from_elsewhere(
    client: Client,
) -> None:
    page = (await client.get("/docs")).text

    assert all(endpoint.summary in page for endpoint in ENDPOINTS)
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
