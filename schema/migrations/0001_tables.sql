-- The tables of NoETL. The log is append-only and has one writer per shard; everything else is
-- either a projection of the log, a lease, or what a client was promised.

CREATE SCHEMA IF NOT EXISTS noetl;

-- Settings that every process must agree on. The shard count is here so that it can change online.
CREATE TABLE noetl.setting (
    name        text PRIMARY KEY,
    value       jsonb NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now()
);
INSERT INTO noetl.setting (name, value) VALUES ('shard_count', '16');

CREATE TABLE noetl.catalog (
    catalog_id  bigint PRIMARY KEY,
    path        text NOT NULL,
    version     integer NOT NULL CHECK (version > 0),
    content     text NOT NULL,
    sha256      bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    UNIQUE (path, version)
);

CREATE TABLE noetl.event (
    execution_id         bigint NOT NULL,
    event_id             bigint NOT NULL,
    event_key            text NOT NULL,
    shard_id             integer NOT NULL,
    event_type           text NOT NULL,
    status               text,
    node_name            text,
    command_id           text,
    loop_id              bigint,
    iter_index           integer,
    attempt              integer,
    parent_event_id      bigint,
    parent_execution_id  bigint,
    catalog_id           bigint,
    epoch_id             bigint,
    context              jsonb,
    result               jsonb,
    meta                 jsonb,
    error                jsonb,
    created_at           timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, event_id),
    CONSTRAINT chk_event_result_shape CHECK (
        result IS NULL OR (
            jsonb_typeof(result) = 'object'
            AND result ? 'status'
            AND result - '{status,reference,parent_ref,context}'::text[] = '{}'::jsonb
            AND pg_column_size(result) <= 8192
        )
    )
) PARTITION BY RANGE (execution_id);

-- An insert never fails for want of a partition; the compactor makes the dated ones ahead of time.
CREATE TABLE noetl.event_default PARTITION OF noetl.event DEFAULT;

CREATE UNIQUE INDEX event_key_idx ON noetl.event (execution_id, event_key);
CREATE INDEX event_shard_idx ON noetl.event (shard_id, event_id);
CREATE INDEX event_loop_idx ON noetl.event (execution_id, loop_id, iter_index)
    WHERE loop_id IS NOT NULL;

-- The work queue: one row per open command, gone when the command has ended.
CREATE TABLE noetl.command (
    execution_id    bigint NOT NULL,
    command_id      text NOT NULL,
    shard_id        integer NOT NULL,
    step            text NOT NULL,
    status          text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'leased')),
    attempt         integer NOT NULL DEFAULT 1,
    max_attempts    integer NOT NULL DEFAULT 5,
    pool            text NOT NULL DEFAULT 'cpu',
    priority        integer NOT NULL DEFAULT 0,
    available_at    timestamptz NOT NULL DEFAULT now(),
    worker_id       text,
    lease_until     timestamptz,
    last_heartbeat  timestamptz,
    target_worker   text,
    target_until    timestamptz,
    payload         bytea NOT NULL,
    meta            jsonb,
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, command_id)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX command_pending_idx ON noetl.command (pool, priority DESC, available_at)
    WHERE status = 'pending';
CREATE INDEX command_leased_idx ON noetl.command (lease_until) WHERE status = 'leased';

-- The status projection: truncate it, replay the log, and the same bytes come back.
CREATE TABLE noetl.execution (
    execution_id             bigint PRIMARY KEY,
    catalog_id               bigint NOT NULL,
    path                     text NOT NULL,
    version                  integer NOT NULL,
    shard_id                 integer NOT NULL,
    status                   text NOT NULL,
    state                    jsonb NOT NULL,
    ctx                      jsonb NOT NULL,
    progress                 jsonb NOT NULL,
    waiting_on               text,
    last_event_type          text NOT NULL,
    last_node_name           text,
    last_projected_event_id  bigint NOT NULL,
    parent_execution_id      bigint,
    error                    jsonb,
    started_at               timestamptz NOT NULL,
    updated_at               timestamptz NOT NULL,
    ended_at                 timestamptz
) WITH (fillfactor = 70);
CREATE INDEX execution_recent_idx ON noetl.execution (started_at DESC, execution_id DESC);
CREATE INDEX execution_path_idx ON noetl.execution (path, started_at DESC);
CREATE INDEX execution_status_idx ON noetl.execution (status, started_at DESC, execution_id DESC);
-- Not on a column that every update changes: those updates could not be HOT then.
CREATE INDEX execution_open_idx ON noetl.execution (execution_id)
    WHERE status IN ('PENDING', 'RUNNING');

-- Who may write which shard. `epoch` is the fencing token: it rises with every change of owner.
CREATE TABLE noetl.execution_shard (
    role              text NOT NULL CHECK (role IN ('broker', 'projection')),
    shard_id          integer NOT NULL,
    owner_runtime_id  bigint,
    owner_instance    text,
    epoch             bigint NOT NULL DEFAULT 0,
    leased_until      timestamptz,
    updated_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (role, shard_id)
) WITH (fillfactor = 50);
INSERT INTO noetl.execution_shard (role, shard_id)
SELECT role, shard_id
FROM unnest(ARRAY['broker', 'projection']) AS role, generate_series(0, 15) AS shard_id;

CREATE TABLE noetl.projection_checkpoint (
    shard_id                 integer PRIMARY KEY,
    last_projected_event_id  bigint NOT NULL DEFAULT 0,
    last_projected_at        timestamptz NOT NULL DEFAULT now(),
    lag_ms                   integer
) WITH (fillfactor = 50);

CREATE TABLE noetl.checkpoint (
    execution_id   bigint NOT NULL,
    shard_id       integer NOT NULL,
    epoch          bigint NOT NULL,
    last_event_id  bigint NOT NULL,
    committed_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, epoch)
);
CREATE INDEX checkpoint_shard_idx ON noetl.checkpoint (shard_id, epoch);

-- One row per stored result; `ref_id` is the id of the event that recorded it.
CREATE TABLE noetl.result_ref (
    execution_id   bigint NOT NULL,
    ref_id         bigint NOT NULL,
    parent_ref_id  bigint,
    step           text NOT NULL,
    store_tier     text NOT NULL CHECK (store_tier IN ('db', 'pvc', 'minio', 's3', 'gcs')),
    physical_uri   text,
    media_type     text NOT NULL DEFAULT 'application/json',
    bytes          bigint NOT NULL,
    sha256         bytea,
    inline         bytea,
    preview        text,
    expires_at     timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, ref_id),
    CHECK ((store_tier = 'db') = (inline IS NOT NULL)),
    CHECK ((store_tier = 'db') = (physical_uri IS NULL))
) PARTITION BY RANGE (execution_id);
CREATE TABLE noetl.result_ref_default PARTITION OF noetl.result_ref DEFAULT;
CREATE INDEX result_ref_parent_idx ON noetl.result_ref (execution_id, parent_ref_id)
    WHERE parent_ref_id IS NOT NULL;

-- Ordered aggregates: the collection of a loop, the pages of a call, an archived execution.
CREATE TABLE noetl.manifest (
    execution_id  bigint NOT NULL,
    manifest_id   bigint NOT NULL,
    kind          text NOT NULL CHECK (kind IN ('collection', 'pages', 'archive')),
    step          text,
    item_count    bigint NOT NULL,
    part_count    integer NOT NULL,
    sha256        bytea,
    meta          jsonb,
    created_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, manifest_id)
);
CREATE TABLE noetl.manifest_part (
    execution_id  bigint NOT NULL,
    manifest_id   bigint NOT NULL,
    part_index    integer NOT NULL,
    item_count    integer NOT NULL,
    store_tier    text NOT NULL CHECK (store_tier IN ('db', 'pvc', 'minio', 's3', 'gcs')),
    physical_uri  text,
    bytes         bigint NOT NULL,
    sha256        bytea,
    inline        bytea,
    PRIMARY KEY (execution_id, manifest_id, part_index),
    CHECK ((store_tier = 'db') = (inline IS NOT NULL)),
    CHECK ((store_tier = 'db') = (physical_uri IS NULL))
);

-- The durable road into a shard: what a client was promised, and everything while NATS is away.
CREATE TABLE noetl.inbox (
    inbox_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard_id    integer NOT NULL,
    body        bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
CREATE INDEX inbox_shard_idx ON noetl.inbox (shard_id, inbox_id);

-- Every living process. `node` is its snowflake node number, leased by the heartbeat.
CREATE TABLE noetl.runtime (
    runtime_id    bigint PRIMARY KEY,
    name          text NOT NULL,
    kind          text NOT NULL,
    uri           text,
    status        text NOT NULL DEFAULT 'ready' CHECK (status IN ('ready', 'draining', 'offline')),
    node          integer UNIQUE CHECK (node BETWEEN 0 AND 1023),
    labels        jsonb,
    capabilities  jsonb,
    capacity      integer,
    runtime       jsonb,
    heartbeat     timestamptz NOT NULL DEFAULT now(),
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    UNIQUE (kind, name)
) WITH (fillfactor = 50);
CREATE INDEX runtime_status_idx ON noetl.runtime (status);

-- Roles that only one process at a time may play (shard-manager, checkpointer, compactor, reaper).
CREATE TABLE noetl.leader (
    role              text PRIMARY KEY,
    owner_runtime_id  bigint,
    epoch             bigint NOT NULL DEFAULT 0,
    leased_until      timestamptz
) WITH (fillfactor = 50);

CREATE TABLE noetl.metric (
    metric_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    runtime_id   bigint,
    name         text NOT NULL,
    value        double precision NOT NULL,
    labels       jsonb,
    reported_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX metric_name_idx ON noetl.metric (name, reported_at DESC);

-- Encrypted at rest; the plain text exists only in a worker, while it runs a command.
CREATE TABLE noetl.credential (
    name        text PRIMARY KEY,
    type        text NOT NULL,
    key_id      text NOT NULL,
    nonce       bytea NOT NULL,
    ciphertext  bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE noetl.api_key (
    key_id      text PRIMARY KEY,
    sha256      bytea NOT NULL UNIQUE,
    name        text NOT NULL,
    scopes      text[] NOT NULL DEFAULT '{}',
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);

CREATE TABLE noetl.audit (
    audit_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    actor         text NOT NULL,
    action        text NOT NULL,
    execution_id  bigint,
    subject       text,
    details       jsonb,
    created_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX audit_execution_idx ON noetl.audit (execution_id) WHERE execution_id IS NOT NULL;

CREATE TABLE noetl.schedule (
    schedule_id  bigint PRIMARY KEY,
    path         text NOT NULL,
    cron         text NOT NULL,
    timezone     text NOT NULL DEFAULT 'UTC',
    payload      jsonb,
    enabled      boolean NOT NULL DEFAULT true,
    next_at      timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now()
);

-- What could not be processed: parked, visible, retryable; the shard went on.
CREATE TABLE noetl.dead_letter (
    dead_letter_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard_id        integer,
    execution_id    bigint,
    source          text NOT NULL,
    body            bytea NOT NULL,
    reason          text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX dead_letter_execution_idx ON noetl.dead_letter (execution_id);
