"""Whatever comes in, the answer is never a 5xx, and every refusal is a problem.

Hypothesis takes the place of strangers: bytes, JSON of the wrong shape, JSON of nearly the right
shape, odd ids, odd queries, at every endpoint of the table.
"""

from typing import Any, get_args
from urllib.parse import quote

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noetl_api_gateway.app import ENDPOINTS
from noetl_api_gateway.endpoint import Endpoint
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client
from services.api_gateway.given import HELLO, an_execution, registered

EXAMPLES = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

text = st.text(max_size=30)
json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
ids = st.sampled_from(["1", "0", "9" * 19, "9" * 20, "-1", "1e3", "x"]) | text
queries = st.dictionaries(
    st.sampled_from(["limit", "cursor", "status", "path", "after", "wait", "version"]) | text,
    st.sampled_from(["", "0", "1", "-1", "0.01", "FAILED", "1-1", "9" * 30, "nan", "\0"]) | text,
    max_size=3,
)


@st.composite
def bodies(draw: st.DrawFn, endpoint: Endpoint) -> bytes:
    """Bytes, any JSON, or an object with the fields of the endpoint and whatever values."""
    shape = draw(st.integers(0, 3))
    if shape == 0:
        return draw(st.binary(max_size=60))
    if shape == 1 or endpoint.body is None:
        return msgspec.json.encode(draw(json_values))
    kind = get_args(endpoint.body)[0] if get_args(endpoint.body) else endpoint.body
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    plausible = st.sampled_from(["examples/hello", HELLO, "{{ a }}", "{{", {"a": 1}, 1, {}])
    values = json_values | plausible if shape == 2 else plausible
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if shape == 2 else names
    body: Any = {name: draw(values) for name in chosen}
    return msgspec.json.encode(body if kind is endpoint.body else [body])


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, dict[str, str], bytes, dict[str, str]]:
    endpoint = draw(st.sampled_from(ENDPOINTS))
    path = endpoint.path
    for name in ("execution_id", "path:path", "step:path", "name"):
        if "{" + name + "}" in path:
            value = draw(ids if name == "execution_id" else text | st.just("greet"))
            path = path.replace("{" + name + "}", quote(value, safe=""))
    body = draw(bodies(endpoint)) if endpoint.body is not None or draw(st.booleans()) else b""
    content_type = draw(
        st.sampled_from(["application/json"] * 6 + ["text/yaml", "", "x/y", "application/json; q"])
    )
    headers = {"Content-Type": content_type}
    if draw(st.booleans()):
        key = draw(st.sampled_from(["", "k", "k" * 300]) | st.text(st.characters(codec="latin-1")))
        headers["Idempotency-Key"] = quote(key, safe=" !?")
    method = draw(st.sampled_from([endpoint.method] * 6 + ["PATCH", "OPTIONS", "HEAD"]))
    return method, path, draw(queries), body, headers


@EXAMPLES
@given(call=calls())
async def test_no_request_makes_the_gateway_fail(
    client: Client,
    pool: Pool,
    call: tuple[str, str, dict[str, str], bytes, dict[str, str]],
) -> None:
    await registered(client)
    if await pool.fetchval("SELECT count(*) FROM noetl.execution") == 0:
        await an_execution(pool, 1)
    method, path, query, body, headers = call
    if method in {"GET", "HEAD"} and "wait" in query:
        query = {**query, "wait": "0.01"}

    answer = await client.request(method, path, params=query, content=body, headers=headers)

    assert answer.status_code < 500, (call, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        if method != "HEAD":
            assert answer.json()["status"] == answer.status_code


@EXAMPLES
@given(content=st.text(max_size=300) | st.text(alphabet="-:[]{}'\"#&*!|>%@` \n\tabc", max_size=80))
async def test_no_text_makes_the_parser_fail(client: Client, content: str) -> None:
    answer = await client.post(
        "/api/catalog/validate",
        content=content.encode("utf-8", "surrogatepass"),
        headers={"Content-Type": "text/yaml"},
    )

    assert answer.status_code < 500, content
