"""Configuration: a frozen struct per service; field `batch_size` is NOETL_BATCH_SIZE, always.

A setting that others know by another name too says so: Meta(extra=also("NOETL_LEASE_SEC")). Its own
name counts where both are set. A number that is empty is not set; by another name 0 is not, either,
where there cannot be none of it: so others say that they set no limit. A wrong value stops the
process before it does anything, and the message names the variable, the value and what was expected
of it.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from noetl_core.domain.errors import NoetlError

PREFIX = "NOETL_"
_SECRET_ENDINGS = ("_dsn", "_key", "_keys", "_secret", "_token", "_password")
_ALSO = "also"
_EXIT_WRONG = 2
_SEQUENCES = (list, tuple, set, frozenset)
_ENDPOINT = r"^(https?://[^@\s]+)?$"
"""No name and password before the host: it is shown in messages."""
_PLACE = re.compile(r"(?!\w+://).+|s3://[\w.-]+(/.*)?")


class ConfigError(NoetlError):
    """The environment is wrong: mend the variables that the message names."""


def also(*variables: str) -> dict[str, tuple[str, ...]]:
    """Other variables that a field is read from, for Meta(extra=...)."""
    return {_ALSO: variables}


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where results and archives are kept."""

    store_dir: Annotated[
        str, Meta(description="Root of the pvc tier; empty stores results in the database only.")
    ] = ""
    archive_dir: Annotated[
        str,
        Meta(
            description="Archives of what is past retention: a directory, or s3://BUCKET/PREFIX; "
            "by default `archive` in STORE_DIR, without one `archive` in S3_BUCKET."
        ),
    ] = ""
    archive_copies_mb: Annotated[
        float,
        Meta(
            gt=0,
            description="Files of archives in S3 that a reader keeps on its disk (TMPDIR), in MB.",
        ),
    ] = 1024.0
    default_store_tier: Annotated[
        Literal["", "db", "pvc", "minio", "s3", "gcs"],
        Meta(
            description="Where results above 64 KiB go while it answers: db, pvc (STORE_DIR), or "
            "s3, minio, gcs (S3_BUCKET); by default pvc if it is set, else s3, else db."
        ),
    ] = ""
    s3_endpoint: Annotated[
        str,
        Meta(
            pattern=_ENDPOINT,
            description="Where the S3 API is, such as http://minio:9000; empty for AWS.",
            extra=also("NOETL_MINIO_ENDPOINT"),
        ),
    ] = ""
    s3_access_key: Annotated[
        str,
        Meta(
            description="Without it, what the machine has for AWS counts.",
            extra=also("NOETL_MINIO_ACCESS_KEY"),
        ),
    ] = ""
    s3_secret_key: Annotated[
        str, Meta(description="Belongs to S3_ACCESS_KEY.", extra=also("NOETL_MINIO_SECRET_KEY"))
    ] = ""
    s3_bucket: Annotated[
        str,
        Meta(
            description="Results and archives go there; made if it is not there.",
            extra=also("NOETL_MINIO_BUCKET"),
        ),
    ] = ""
    s3_region: Annotated[
        str, Meta(description="By default us-east-1.", extra=also("NOETL_MINIO_REGION"))
    ] = ""
    s3_timeout_seconds: Annotated[
        float, Meta(gt=0, description="A request may take so long, and a second for each MB.")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.archive_dir and not _PLACE.fullmatch(self.archive_dir):
            raise ValueError(
                f"NOETL_ARCHIVE_DIR={self.archive_dir!r}: expected a directory or s3://BUCKET/PREFIX"
            )
        needs = {"": True, "db": True, "pvc": bool(self.store_dir)}
        if not needs.get(self.default_store_tier, bool(self.s3_bucket)):
            variable = "NOETL_STORE_DIR" if self.default_store_tier == "pvc" else "NOETL_S3_BUCKET"
            raise ValueError(
                f"NOETL_DEFAULT_STORE_TIER={self.default_store_tier!r} needs {variable}"
            )
        if bool(self.s3_access_key) != bool(self.s3_secret_key):
            raise ValueError("NOETL_S3_ACCESS_KEY and NOETL_S3_SECRET_KEY: set both, or neither")

    @property
    def archives(self) -> str:
        """Where they are; empty for nowhere."""
        if self.archive_dir:
            return self.archive_dir
        if self.store_dir:
            return str(Path(self.store_dir, "archive"))
        return f"s3://{self.s3_bucket}/archive" if self.s3_bucket else ""


class Config(StoreConfig, frozen=True, kw_only=True):
    """What every service reads."""

    postgres_dsn: Annotated[str, Meta(description="Where the one Postgres is.")]
    nats_url: Annotated[str, Meta(description="Where NATS is.")] = "nats://127.0.0.1:4222"
    instance: Annotated[
        str, Meta(description="Name of this process; by default service, host and pid.")
    ] = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    health_host: Annotated[str, Meta(description="Address of the health server.")] = "127.0.0.1"
    health_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the health server; 0 for none.")
    ] = 0
    otlp_endpoint: Annotated[
        str,
        Meta(
            pattern=r"^(https?://.+)?$",
            description="Where traces and metrics are sent, as OTLP over HTTP with protobuf, such "
            "as http://collector:4318; empty sends none.",
            # What a cluster sets for all its pods counts for ours.
            extra=also("OTEL_EXPORTER_OTLP_ENDPOINT"),
        ),
    ] = ""


C = TypeVar("C", bound=StoreConfig)


def variables_of(field: msgspec.structs.FieldInfo) -> tuple[str, ...]:
    """What the field is read from: its own variable, then its other names."""
    metas = get_args(field.type) if get_origin(field.type) is Annotated else ()
    others = (m.extra.get(_ALSO, ()) for m in metas if isinstance(m, Meta) and m.extra)
    return (PREFIX + field.name.upper(), *(name for names in others for name in names))


def load_config(kind: type[C], environ: Mapping[str, str]) -> C:
    """Read every field of `kind` from NOETL_<FIELD>; complain about all wrong ones at once."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for field in msgspec.structs.fields(kind):
        own = variables_of(field)[0]
        variable = next((v for v in variables_of(field) if _is_set(field, v, environ)), None)
        if variable is not None:
            try:
                values[field.name] = _parse(environ[variable], field.type)
            except msgspec.ValidationError as error:
                problems.append(f"{variable}={_shown(field.name, environ[variable])}: {error}")
        elif field.required:
            problems.append(f"{own} is not set")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return kind(**values)
    except ValueError as error:  # a rule between two fields, kept by __post_init__
        raise ConfigError(str(error)) from error


def load_or_exit(kind: type[C]) -> C:
    """The first line of a process: a wrong environment ends it, and says what is wrong."""
    try:
        return load_config(kind, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"configuration: {error}\n")
        sys.exit(_EXIT_WRONG)


def _is_set(field: msgspec.structs.FieldInfo, variable: str, environ: Mapping[str, str]) -> bool:
    if variable not in environ:
        return False
    plain = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    if plain not in (int, float):
        return True
    text = environ[variable].strip()
    if text == "0" and variable != variables_of(field)[0]:
        return not any(isinstance(m, Meta) and m.gt == 0 for m in get_args(field.type))
    return text != ""


def default_instance(service: str) -> str:
    return f"{service}-{socket.gethostname()}-{os.getpid()}"


def _parse(text: str, kind: Any) -> Any:
    plain = kind.__origin__ if get_origin(kind) is Annotated else kind
    if (get_origin(plain) or plain) in _SEQUENCES:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return msgspec.convert(parts, kind, strict=False)
    return msgspec.convert(text, kind, strict=False)


def _shown(name: str, value: str) -> str:
    # An address may have a password in it, before the host.
    is_secret = name.endswith(_SECRET_ENDINGS) or "@" in value
    return "(hidden)" if is_secret else repr(value)
