"""Values into and out of Postgres: plain data on our side, the type of the column on theirs."""

import base64
import datetime as dt
import ipaddress
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec

_ISO_TIME: dict[str, Callable[[str], Any]] = {
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timetz": dt.time.fromisoformat,
    "timestamp": dt.datetime.fromisoformat,
    "timestamptz": dt.datetime.fromisoformat,
}
_INTEGERS = frozenset({"int2", "int4", "int8", "oid"})
_FLOATS = frozenset({"float4", "float8"})
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "citext", "unknown"})
_JSONS = frozenset({"json", "jsonb"})


def to_column(value: Any, type_name: str) -> Any:
    """A parameter as the driver wants it for a column of this type.

    Raises ValueError or TypeError where the value is none of that type.
    """
    if value is None:
        return None
    if type_name.endswith("[]"):
        return [to_column(item, type_name[:-2]) for item in value]
    if type_name in _JSONS:
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if type_name in _TEXTS:
        return value if isinstance(value, str) else _as_text(value)
    if type_name == "numeric":
        return Decimal(str(value))
    if isinstance(value, str):
        return _from_text(value, type_name)
    return value


def from_column(value: Any) -> Any:
    """A value of a row as plain data."""
    convert = _OUT.get(type(value), _other)
    return convert(value)


def _as_text(value: Any) -> str:
    if isinstance(value, dict | list | bool):
        return msgspec.json.encode(value).decode()
    return str(value)


def _from_text(text: str, type_name: str) -> Any:
    if type_name in _INTEGERS:
        return int(text)
    if type_name in _FLOATS:
        return float(text)
    if type_name == "bool":
        return _BOOLEANS[text.strip().lower()]
    if type_name == "bytea":
        return text.encode()
    if type_name in _ISO_TIME:
        return _ISO_TIME[type_name](text)
    return text


_BOOLEANS = {
    "true": True, "t": True, "yes": True, "on": True, "1": True,
    "false": False, "f": False, "no": False, "off": False, "0": False,
}  # fmt: skip


def _same(value: Any) -> Any:
    return value


def _number(value: Decimal) -> int | float | str:
    """As a number where that loses nothing, else as text: money is never rounded here."""
    if not value.is_finite():
        return str(value)
    if value == value.to_integral_value() and -value.as_tuple().exponent <= 0:  # type: ignore[operator]
        return int(value)
    as_float = float(value)
    return as_float if Decimal(repr(as_float)) == value else str(value)


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _binary(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _items(value: Any) -> list[Any]:
    return [from_column(item) for item in value]


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): from_column(item) for key, item in value.items()}


def _iso(value: Any) -> str:
    return str(value.isoformat())


def _duration(value: dt.timedelta) -> str:
    return str(msgspec.to_builtins(value))


def _other(value: Any) -> Any:
    """Records become mappings; networks, ranges and points their text."""
    if hasattr(value, "keys"):
        return {key: from_column(value[key]) for key in value.keys()}  # noqa: SIM118 - a record
    return str(value)


_OUT: dict[type, Callable[[Any], Any]] = {
    str: _same,
    int: _same,
    bool: _same,
    type(None): _same,
    float: _float,
    Decimal: _number,
    bytes: _binary,
    list: _items,
    tuple: _items,
    dict: _mapping,
    dt.date: _iso,
    dt.time: _iso,
    dt.datetime: _iso,
    dt.timedelta: _duration,
    ipaddress.IPv4Address: str,
    ipaddress.IPv6Address: str,
}
