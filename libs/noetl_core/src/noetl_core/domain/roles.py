"""What somebody with an API key may do: each role includes those before it."""

from typing import Literal, get_args

Role = Literal["reader", "operator", "admin"]

ROLES: tuple[Role, ...] = get_args(Role)


def includes(role: Role, least: Role) -> bool:
    return ROLES.index(role) >= ROLES.index(least)
