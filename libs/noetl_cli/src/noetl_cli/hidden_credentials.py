"""Credentials for whoever only looks: every field of every one is `***`, and none is opened."""

from collections.abc import Iterator, Mapping

from noetl_worker.tools.tool import Credential

HIDDEN = "***"


class _Hidden(Mapping[str, str]):
    def __getitem__(self, name: str) -> str:
        return HIDDEN

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


async def open_hidden(name: str) -> Credential:
    return Credential(name=name, type="", data=_Hidden())
