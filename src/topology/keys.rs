//! Every key of the file, once: the checker knows a key by it, and `docs/reference.md` is made of it.

mod stateful;

pub use stateful::{AGGREGATE, FIELD, JOIN, TABLE, WINDOW};

/// A key of a table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    pub name: &'static str,
    /// What it takes, in the words of the reference.
    pub takes: &'static str,
    /// The default as one would write it; `required`, or nothing where absence means absence.
    pub default: &'static str,
    pub doc: &'static str,
}

/// A table of the file.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// How the table is written.
    pub title: &'static str,
    pub doc: &'static str,
    pub keys: &'static [Key],
}

impl Section {
    /// The names of its keys.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.keys.iter().map(|key| key.name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name)
    }
}

const fn key(name: &'static str, takes: &'static str, default: &'static str, doc: &'static str) -> Key {
    Key { name, takes, default, doc }
}

const TYPE: &str = "the node's type";
const ON_ERROR: Key = key(
    "on_error",
    "`\"reject\"`, `\"skip\"` or `\"stop\"`",
    "the file's",
    "what happens to a record that this node fails on",
);
const INPUTS: Key = key(
    "inputs",
    "names",
    "required",
    "the nodes to read; several merge, in no particular order between them; an output of a route is `route.output`",
);
const TOMBSTONES: Key = key(
    "tombstones",
    "`\"pass\"`, `\"drop\"` or `\"process\"`",
    "\"pass\"",
    "what happens to a null value: on it goes untouched (from a route to every output), it ends here, or the \
     expression sees `null`",
);

pub const TOP: Section = Section {
    title: "Top level",
    doc: "What holds for the whole topology. In TOML these keys stand before the first table.",
    keys: &[
        key(
            "name",
            "a name",
            "required",
            "names the consumer groups, internal topics and transactional ids: renaming starts a new job",
        ),
        key(
            "guarantee",
            "`\"exactly-once\"`, `\"at-least-once\"` or `\"at-most-once\"`",
            "\"exactly-once\"",
            "what the Kafka part promises; `semel explain` shows it edge by edge",
        ),
        key(
            "commit_interval",
            "a duration",
            "\"100ms\"",
            "how long a transaction stays open; below half of `transaction_timeout`",
        ),
        key(
            "batch_records",
            "a number from 1",
            "",
            "seals a transaction earlier, after this many records; 1 is a transaction a record",
        ),
        key("workers", "1 to 256", "1", "threads of this process, each with its own consumer and transactions"),
        key("memory", "a size from 1MiB", "\"12MiB\"", "bytes that a worker's queues may hold"),
        key(
            "shutdown_timeout",
            "a duration",
            "\"30s\"",
            "how long a stop may take until the open batch is given up (it is redone at the next start)",
        ),
        key(
            "transaction_timeout",
            "a duration from 1s",
            "\"10s\"",
            "after this the broker aborts a transaction whose process hangs; below `session_timeout`",
        ),
        key(
            "session_timeout",
            "a duration",
            "\"15s\"",
            "after this the group gives away the partitions of a process that is gone; where the broker assigns, its own \
             `group.consumer.session.timeout.ms` counts",
        ),
        key(
            "membership",
            "`\"static\"` or `\"dynamic\"`",
            "`\"static\"`, with `\"group.protocol\" = \"consumer\"` `\"dynamic\"`",
            "in the consumer groups (KIP-345): a static member that comes back within the session has its partitions \
             again without a rebalance, and the ones of a member that stopped rest for so long; where the broker \
             assigns (KIP-848), a static member that crashed is let in again when its session there has ended",
        ),
        key(
            "instance",
            "letters, digits, `.`, `_`, `-`",
            "made once, kept in `state_dir`",
            "the identity of this process in transactional ids and group membership; two running processes need two",
        ),
        key(
            "state_dir",
            "a path",
            "`$XDG_STATE_HOME/semel`, else `~/.local/state/semel`",
            "where the instance identity is kept, and state on disk",
        ),
        key(
            "stores",
            "`\"disk\"` or `\"memory\"`",
            "\"disk\"",
            "where aggregates and tables keep their state: in files under `state_dir`, so that a start reads only what is newer from the \
             changelogs, or in memory, so that it reads all of them",
        ),
        key(
            "max_task_idle",
            "a duration",
            "\"0s\"",
            "of the topics that a join reads the record with the lowest time goes first, so that records wait for those that \
             lie in the other topic already; how long they also wait where it is at its end",
        ),
        key(
            "audit",
            "a boolean",
            "`false`",
            "outputs name the record that they come from, in a header `semel-origin`: `NAME/TOPIC/PARTITION/OFFSET`, for \
             `semel audit`",
        ),
        key(
            "on_error",
            "`\"reject\"`, `\"skip\"` or `\"stop\"`",
            "\"reject\"",
            "what happens to a record that a node fails on: to the dead-letter topic, dropped and counted, or the job \
             stops (exit 5)",
        ),
        key("kafka", "a table", "required", "the cluster"),
        key("sources", "tables", "required", "what is read"),
        key("transforms", "tables", "", "what is done to it"),
        key("sinks", "tables", "required", "where it goes"),
        key("tests", "an array of tables", "", "cases that `semel test` runs"),
        key("drill", "a table", "", "what `semel drill` shows of the topology"),
    ],
};

pub const DRILL: Section = Section {
    title: "`[drill]`",
    doc: "Makes `semel drill` a comparison: the inputs of the tests arrive one by one, and under each guarantee the process \
     is killed at the middle one.",
    keys: &[key(
        "guarantees",
        "an array of guarantees",
        "required",
        "what to compare, such as `[\"at-most-once\", \"at-least-once\", \"exactly-once\"]`",
    )],
};

pub const KAFKA: Section = Section {
    title: "`[kafka]`",
    doc: "The cluster that all sources and Kafka sinks are on.",
    keys: &[
        key("brokers", "`host:port`, several by comma", "required", "where to find the cluster"),
        key(
            "properties",
            "a table",
            "{}",
            "any librdkafka property, such as `\"client.rack\"` or `\"security.protocol\"`; those that would break \
             the guarantee are refused by name",
        ),
    ],
};

pub const SOURCE: Section = Section {
    title: "`[sources.NAME]`, `type = \"kafka\"`",
    doc: "Reads topics, only what is committed there.",
    keys: &[
        key("type", "`\"kafka\"`", "required", TYPE),
        key("topics", "topic names", "required", "one or several; a topic belongs to one source"),
        key(
            "format",
            "`\"json\"`, `\"string\"` or `\"bytes\"`",
            "\"json\"",
            "what a value is; `json` means an object. Also `{ type = \"json\" }`",
        ),
        key(
            "event_id",
            "VRL",
            "",
            "the event's identity, such as `.event_id`; missing or null in a record with a value rejects the record. \
             Without it the coordinates (topic, partition, offset) are the identity, which does not survive a \
             producer's second send",
        ),
        key("event_time", "VRL", "the record's timestamp", "when the event happened"),
        key(
            "max_ahead",
            "a duration",
            "\"1h\" where windows are told by `event_time`",
            "how far past its record's own timestamp an event's time may lie; further ahead the record is rejected (`ahead`)",
        ),
        key(
            "start",
            "`\"earliest\"`, `\"latest\"` or a time",
            "\"earliest\"",
            "where a job begins that never ran; afterwards its committed positions count. A time is RFC 3339 or \
             milliseconds since 1970",
        ),
        ON_ERROR,
    ],
};

pub const FORMAT: Section = Section {
    title: "`format = { … }`",
    doc: "The long form of a source's `format`.",
    keys: &[key("type", "`\"json\"`, `\"string\"` or `\"bytes\"`", "required", "what a value is")],
};

pub const FILTER: Section = Section {
    title: "`[transforms.NAME]`, `type = \"filter\"`",
    doc: "Passes the records whose condition is true.",
    keys: &[
        key("type", "`\"filter\"`", "required", TYPE),
        INPUTS,
        key("condition", "VRL", "required", "a boolean; may read but not assign"),
        TOMBSTONES,
        ON_ERROR,
    ],
};

pub const REMAP: Section = Section {
    title: "`[transforms.NAME]`, `type = \"remap\"`",
    doc: "Changes records by a VRL program. `abort` drops the record. Members that the program does not write keep \
     their bytes.",
    keys: &[
        key("type", "`\"remap\"`", "required", TYPE),
        INPUTS,
        key(
            "source",
            "VRL",
            "required",
            "the program; `.` is the value, `%key %topic %partition %offset %timestamp %headers %event_id` are \
             metadata",
        ),
        TOMBSTONES,
        ON_ERROR,
    ],
};

pub const ROUTE: Section = Section {
    title: "`[transforms.NAME]`, `type = \"route\"`",
    doc: "Sends each record to the first output whose condition is true, else to `NAME._unmatched`.",
    keys: &[
        key("type", "`\"route\"`", "required", TYPE),
        INPUTS,
        key("routes", "an array of tables", "required", "the outputs in order, read elsewhere as `NAME.OUTPUT`"),
        TOMBSTONES,
        ON_ERROR,
    ],
};

pub const ROUTE_OUTPUT: Section = Section {
    title: "`routes = [ { … } ]`",
    doc: "An output of a route.",
    keys: &[
        key("name", "a name", "required", "the output's name"),
        key("condition", "VRL", "required", "a boolean; may read but not assign"),
    ],
};

pub const FLAT_MAP: Section = Section {
    title: "`[transforms.NAME]`, `type = \"flat_map\"`",
    doc: "Makes many records of one: the program's result is an array, each element becomes a record with the key of \
     the input.",
    keys: &[
        key("type", "`\"flat_map\"`", "required", TYPE),
        INPUTS,
        key("source", "VRL", "required", "the program; its last expression is an array"),
        TOMBSTONES,
        ON_ERROR,
    ],
};

pub const REKEY: Section = Section {
    title: "`[transforms.NAME]`, `type = \"rekey\"`",
    doc: "Gives records another Kafka key.",
    keys: &[
        key("type", "`\"rekey\"`", "required", TYPE),
        INPUTS,
        key(
            "key",
            "VRL",
            "required",
            "the key: a string's bytes, a number's or boolean's JSON text, null for none; objects and arrays are \
             rejected, and so is a null value whose key would come from it",
        ),
        ON_ERROR,
    ],
};

pub const KAFKA_SINK: Section = Section {
    title: "`[sinks.NAME]`, `type = \"kafka\"`",
    doc: "Writes to a topic, in one transaction with the positions of what was read. Partitions are chosen as Java \
     clients do (murmur2 of the key).",
    keys: &[
        key("type", "`\"kafka\"`", "required", TYPE),
        INPUTS,
        key("topic", "a topic name", "required", "where records go; it must exist unless `create` is given"),
        key("key", "VRL", "the input's key", "the Kafka key, as in `rekey`"),
        key("create", "a table", "", "makes the topic where it is missing"),
        ON_ERROR,
    ],
};

pub const CREATE: Section = Section {
    title: "`create = { … }`",
    doc: "How a missing topic is made.",
    keys: &[
        key("partitions", "a number from 1", "required", "partitions of the topic"),
        key("replication", "a number from 1", "the broker's", "its replication factor"),
        key("config", "a table", "{}", "topic settings such as `\"cleanup.policy\"`"),
    ],
};

pub const POSTGRES_SINK: Section = Section {
    title: "`[sinks.NAME]`, `type = \"postgres\"`",
    doc: "Writes records to a table, by default in version-guarded upserts: a row is replaced, in full, when a higher \
     version comes. It is a stage of its own, in the consumer group `<name>.<sink>`. The table is never made by \
     semel; without it `run` prints a fitting CREATE TABLE. Each column with a top-level member of its name is \
     written; absent means NULL.",
    keys: &[
        key("type", "`\"postgres\"`", "required", TYPE),
        key("inputs", "names", "required", "Kafka sinks and sources of this file: their topics are read"),
        key("url", "a connection URL", "required", "such as `\"${DATABASE_URL}\"`; keep passwords out of the file"),
        key("table", "`table` or `schema.table`", "required", "the table"),
        key(
            "mode",
            "`\"upsert\"`, `\"insert\"`, `\"add\"` or `\"update\"`",
            "\"upsert\"",
            "what a record does: `upsert` inserts or replaces the row of its key; `insert` adds a row, always; `add` \
             adds its numbers to the row of its key; `update` replaces the row of its key where there is one and it \
             differs",
        ),
        key(
            "key",
            "column names",
            "required, but for `insert`",
            "the columns of its primary key or of a unique index; `insert` has none",
        ),
        key(
            "version",
            "a column name",
            "required for `upsert`",
            "an integer column, NOT NULL; the guard is `WHERE t.version < excluded.version`, of equal versions the \
             first wins. `update` may have one, `insert` and `add` have none",
        ),
        key(
            "deleted",
            "a column name",
            "",
            "a boolean column: deletes are rows marked true, so that an older version cannot bring one back",
        ),
        key("delete_when", "VRL", "", "a boolean: the record deletes its row; needs `deleted`"),
        key(
            "columns",
            "a table of VRL",
            "{}",
            "columns made by an expression instead of taken from the member of their name",
        ),
        key(
            "unknown_fields",
            "`\"ignore\"` or `\"reject\"`",
            "\"ignore\"",
            "what happens to a member that has no column",
        ),
        key(
            "tombstones",
            "`\"reject\"`, `\"ignore\"` or `\"delete\"`",
            "\"reject\"",
            "what happens to a null value; `delete` needs a key of one column, which the record's key fills, and a \
             version made of metadata",
        ),
        key(
            "dedupe",
            "a table",
            "",
            "a ledger of event ids in the same database transaction: what a producer or a redelivery brings again has \
             no effect; needs an `event_id` at the sources",
        ),
        key(
            "progress",
            "`\"kafka\"` or `\"postgres\"`",
            "\"kafka\"",
            "where positions are kept: in Kafka, which makes the stage effectively-once, or beside the rows in the same \
             database transaction (`semel.sink_offsets`), which makes it exactly-once into that database",
        ),
        key("batch_rows", "1 to 100000", "1000", "rows of a database transaction at most"),
        key("batch_bytes", "a size from 64KiB", "\"8MiB\"", "bytes of a database transaction at most"),
        key("prepared", "a boolean", "true", "`false` sends unnamed statements, for a pooler in transaction mode"),
        key(
            "max_rejects_per_minute",
            "a number from 0",
            "1000",
            "more rejects a minute than this stop the stage (exit 5): most likely the table is wrong and not the \
             records",
        ),
        ON_ERROR,
    ],
};

pub const LEDGER: Section = Section {
    title: "`dedupe = { … }`",
    doc: "The ledger of a Postgres sink: the event ids that had their effect. A table of its own for each sink, in daily \
     partitions by the time in the ids where the sources declare `event_time`, else flat.",
    keys: &[
        key("table", "`table` or `schema.table`", "required", "the ledger; its partitions are made by semel"),
        key(
            "retention",
            "a duration from 1h",
            "required",
            "how long an id is remembered: longer than anything may come again",
        ),
    ],
};

pub const TEST: Section = Section {
    title: "`[[tests]]`",
    doc: "A case for `semel test`. A sink that is not named is not checked.",
    keys: &[
        key("name", "text", "required", "what the case shows"),
        key("inputs", "an array of tables", "required", "records, in order"),
        key("outputs", "an array of tables", "required", "what is expected of sinks"),
    ],
};

pub const TEST_INPUT: Section = Section {
    title: "`[[tests.inputs]]`",
    doc: "A record of a source, its value given in exactly one of the forms `value`, `json`, `text`, `base64`, \
     `tombstone`.",
    keys: &[
        key("source", "a source's name", "required", "where the record comes from"),
        key("topic", "a topic name", "the source's first", "for a source of several topics"),
        key("key", "text", "null", "the Kafka key"),
        key("value", "any TOML", "", "the value, written as JSON"),
        key("json", "text", "", "the value's exact text"),
        key("text", "text", "", "the value's exact text, for sources that are not JSON"),
        key("base64", "text", "", "the value's bytes"),
        key("tombstone", "`true`", "", "a null value"),
        key(
            "headers",
            "pairs",
            "[]",
            "`[[\"name\", \"value\"], [\"name\"]]`: in order, repeats kept, one without a value is null",
        ),
        key("timestamp", "a time", "the test's clock", "RFC 3339 or milliseconds since 1970"),
        key("partition", "a number from 0", "0", "the partition"),
    ],
};

pub const TEST_OUTPUT: Section = Section {
    title: "`[[tests.outputs]]`",
    doc: "What is expected of a sink: `records` of a Kafka sink and of `dead_letters`, `rows` and `deleted` of a \
     Postgres sink.",
    keys: &[
        key("sink", "a sink's name or `dead_letters`", "required", "whose output"),
        key("records", "an array of tables", "", "all its records, in order; only keys that are given are compared"),
        key(
            "rows",
            "an array of tables",
            "",
            "the live rows sorted by key (in `insert` as they came); columns that are given are compared",
        ),
        key(
            "deleted",
            "keys",
            "",
            "keys of the rows that are marked deleted, sorted; of several columns an array each",
        ),
    ],
};

pub const EXPECTED_RECORD: Section = Section {
    title: "`records` of a Kafka sink",
    doc: "An expected record, its value given in at most one of the forms `value`, `json`, `text`, `base64`, \
     `tombstone`.",
    keys: &[
        key("key", "text", "", "the Kafka key"),
        key("null_key", "`true`", "", "expects a null key"),
        key("value", "any TOML", "", "compared as JSON"),
        key("json", "text", "", "compared byte for byte"),
        key("text", "text", "", "compared byte for byte"),
        key("base64", "text", "", "compared byte for byte"),
        key("tombstone", "`true`", "", "expects a null value"),
        key("headers", "pairs", "", "all headers, in order, but those that semel adds"),
        key("timestamp", "a time", "", "RFC 3339 or milliseconds since 1970"),
        key("partition", "a number from 0", "", "the partition; a sink's topic has one unless `create` says otherwise"),
    ],
};

pub const EXPECTED_REJECT: Section = Section {
    title: "`records` of `dead_letters`",
    doc: "An expected dead letter.",
    keys: &[
        key("node", "a node's name", "", "the node that rejected the record"),
        key("reason", "a reason", "", "why; see the reasons below"),
    ],
};

/// All tables in the order of the reference.
pub const SECTIONS: &[&Section] = &[
    &TOP,
    &KAFKA,
    &SOURCE,
    &FORMAT,
    &FILTER,
    &REMAP,
    &ROUTE,
    &ROUTE_OUTPUT,
    &FLAT_MAP,
    &REKEY,
    &AGGREGATE,
    &WINDOW,
    &FIELD,
    &TABLE,
    &JOIN,
    &KAFKA_SINK,
    &CREATE,
    &POSTGRES_SINK,
    &LEDGER,
    &TEST,
    &TEST_INPUT,
    &TEST_OUTPUT,
    &EXPECTED_RECORD,
    &EXPECTED_REJECT,
    &DRILL,
];
