"""`python -m noetl_api_gateway.print_openapi > schema/openapi.yaml`; a test proves it was done."""

import sys

import msgspec
import yaml

from noetl_api_gateway.app import ENDPOINTS
from noetl_api_gateway.openapi import openapi_document


def openapi_yaml() -> str:
    # Through JSON: YAML would point at what two places share, and readers would have to follow.
    document = msgspec.json.decode(msgspec.json.encode(openapi_document(ENDPOINTS)))
    text: str = yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)
    return f"# Made from the table of endpoints in services/api-gateway; do not edit.\n{text}"


if __name__ == "__main__":
    sys.stdout.write(openapi_yaml())
