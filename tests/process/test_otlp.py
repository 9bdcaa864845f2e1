"""Whatever the collector is or answers: what is sent may be lost, and nothing else."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import CapturingLogger

from noetl_core.process import otlp
from noetl_core.process.config import Config, ConfigError, load_config
from noetl_core.process.otlp import _Door

DSN = {"NOETL_POSTGRES_DSN": "postgresql://nobody"}


@contextmanager
def one_that_answers(answer: bytes) -> Iterator[str]:
    """Its address; it hangs up after each answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            with caller:
                caller.recv(65_536)
                caller.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_is_told_once_and_ends_nothing(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(otlp, "log", said)

    with one_that_answers(answer) as url:
        door = _Door(url)
        sent = [door.send(b"spans"), door.send(b"spans")]

    assert sent == [False, False]
    assert [call.args for call in said.calls] == [("telemetry.undelivered",)]


def test_an_address_that_is_none_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "log", CapturingLogger())

    assert not _Door("http://[nobody/v1/traces").send(b"spans")


def endpoint(**environ: str) -> str:
    return load_config(Config, DSN | environ).otlp_endpoint


def test_the_name_that_everybody_else_gives_the_endpoint_counts_where_ours_is_not_set() -> None:
    theirs = "http://collector:4318"

    assert endpoint() == ""
    assert endpoint(OTEL_EXPORTER_OTLP_ENDPOINT=theirs) == theirs
    assert (
        endpoint(OTEL_EXPORTER_OTLP_ENDPOINT=theirs, NOETL_OTLP_ENDPOINT="http://a") == "http://a"
    )
    assert endpoint(OTEL_EXPORTER_OTLP_ENDPOINT=theirs, NOETL_OTLP_ENDPOINT="") == ""


def test_an_endpoint_that_is_none_is_named_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint(OTEL_EXPORTER_OTLP_ENDPOINT="collector:4317")
