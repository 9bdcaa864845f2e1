"""`--payload` and `--set`: what a user types becomes the payload of an execution."""

from pathlib import Path
from typing import Any

import pytest

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.payload import build_payload


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3.5", 3.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("plain words", "plain words"),
        ('"3"', "3"),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ("[1, two]", [1, "two"]),
        ("2024-05-01", "2024-05-01"),
        (".nan", ".nan"),
        ("a: b: c", "a: b: c"),
        ("x=y", "x=y"),
    ],
)
def test_a_value_is_read_as_yaml_and_stays_text_where_json_has_no_word(
    text: str, value: Any
) -> None:
    assert build_payload(None, [f"key={text}"]) == {"key": value}


def test_dotted_keys_nest_and_the_last_one_wins() -> None:
    payload = build_payload(None, ["a.b.c=1", "a.b.d=2", "a.b.c=3"])

    assert payload == {"a": {"b": {"c": 3, "d": 2}}}


def test_set_goes_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "payload.json"
    file.write_text('{"api": {"url": "http://a", "page": 1}}')

    assert build_payload(file, ["api.page=2"]) == {"api": {"url": "http://a", "page": 2}}


@pytest.mark.parametrize("assignments", [["novalue"], ["=1"], ["a=1", "a.b=2"]])
def test_a_set_that_makes_no_sense_is_a_usage_error_that_repeats_it(assignments: list[str]) -> None:
    with pytest.raises(CommandFailed) as failed:
        build_payload(None, assignments)

    assert failed.value.exit_code == EXIT_USAGE
    assert repr(assignments[-1]) in str(failed.value)


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "{a: 2024-05-01}", "{a: [", ""])
def test_a_payload_file_must_hold_one_object_of_json_values(tmp_path: Path, text: str) -> None:
    file = tmp_path / "payload.yaml"
    file.write_text(text)

    with pytest.raises(CommandFailed, match=r"payload\.yaml") as failed:
        build_payload(file, [])

    assert failed.value.exit_code == EXIT_USAGE
