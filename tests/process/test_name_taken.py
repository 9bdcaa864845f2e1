"""Two of one name: the message says what to change."""

import pytest

from noetl_core.process.membership import NameTakenError


@pytest.mark.parametrize(
    ("kind", "variable"), [("api-gateway", "NOETL_SERVER_NAME"), ("worker", "NOETL_INSTANCE")]
)
def test_it_names_the_variable_that_gives_each_a_name_of_its_own(kind: str, variable: str) -> None:
    assert f"give each a {variable} of its own" in str(NameTakenError(kind=kind, name="a"))
