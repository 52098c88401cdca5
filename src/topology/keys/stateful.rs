//! The keys of nodes that keep state.

use super::{INPUTS, ON_ERROR, Section, TYPE, key};

pub const AGGREGATE: Section = Section {
    title: "`[transforms.NAME]`, `type = \"aggregate\"`",
    doc: "Folds the records of each key into one that tells of all of them, and puts it out at every change: under the \
     key, a JSON object of the key and the fields. What it keeps lies in a store, and in the topic \
     `<name>.NAME.changelog`, which is written in one transaction with the outputs. See \
     [aggregates.md](aggregates.md).",
    keys: &[
        key("type", "`\"aggregate\"`", "required", TYPE),
        INPUTS,
        key(
            "group_by",
            "VRL",
            "the record's key",
            "the key to group by, as in `rekey`; records go through the topic `<name>.NAME.repartition` then, so that those \
             of one key meet in one partition",
        ),
        key(
            "fields",
            "a table",
            "required",
            "what an update tells, by name: `\"count\"` of the records, or a function of a VRL expression such as \
             `{ sum = \".total\" }`. Values that are null or missing are passed over",
        ),
        key("window", "a table", "", "groups by time too; updates hold `window_start` and `window_end`"),
        key("key_field", "a name", "\"key\"", "the member of an update that holds the key, as a string"),
        key(
            "tombstones",
            "`\"drop\"` or `\"reject\"`",
            "\"drop\"",
            "what happens to a null value: it ends here and is counted, or it is a dead letter",
        ),
        ON_ERROR,
    ],
};

pub const WINDOW: Section = Section {
    title: "`window = { … }`",
    doc: "Groups by the time of the event too, in UTC: windows are `tumbling`, `hopping` or a `session`. One closes \
     when a record comes whose time lies `grace` past its end (a session's: the pause and `grace`); a record all of \
     whose windows have closed is late. See [aggregates.md](aggregates.md#windows).",
    keys: &[
        key(
            "tumbling",
            "a duration",
            "",
            "windows of this length, one after another since 1970, such as `\"1m\"`; a day is one in UTC",
        ),
        key("hopping", "a duration", "", "windows of this length that overlap: one begins every `advance`"),
        key("advance", "a duration", "required with `hopping`", "how far apart hopping windows begin"),
        key(
            "session",
            "a duration",
            "",
            "windows as long as the records of a key go on: one ends with the record after which none comes for longer than \
             this",
        ),
        key("grace", "a duration", "\"0s\"", "how long after its end a window takes records"),
        key(
            "emit",
            "`\"update\"` or `\"close\"`",
            "\"update\"",
            "a window is put out at every record, or once: when it closes, in the transaction of the record that closed it",
        ),
        key(
            "late",
            "`\"drop\"` or `\"reject\"`",
            "\"drop\"",
            "what happens to a late record: it is counted and puts out nothing, or it is a dead letter (`late`)",
        ),
        key(
            "idle",
            "a duration",
            "",
            "with `emit = \"close\"`: when a partition brought nothing for so long its time goes on with the clock, so that its \
             last windows close; what comes then may be late, which a replay decides otherwise",
        ),
    ],
};

pub const TABLE: Section = Section {
    title: "`[transforms.NAME]`, `type = \"table\"`",
    doc: "Keeps the latest value of each key, for joins to look up, and passes records on. A null value removes the row of its \
     key. What it keeps lies in a store, and in the topic `<name>.NAME.changelog`. See [joins.md](joins.md).",
    keys: &[key("type", "`\"table\"`", "required", TYPE), INPUTS, ON_ERROR],
};

pub const JOIN: Section = Section {
    title: "`[transforms.NAME]`, `type = \"join\"`",
    doc: "Gives each record the row of a table that has its key, as a member. Where the input is a `table`, too, a \
     change of either puts out what both are now, and a null value where nothing is left. The topics of both have as \
     many partitions, and their records are partitioned alike. Of the two the record with the lowest time goes first. \
     See [joins.md](joins.md).",
    keys: &[
        key("type", "`\"join\"`", "required", TYPE),
        INPUTS,
        key("table", "a name", "required", "the `table` of this file that is looked up"),
        key(
            "kind",
            "`\"inner\"`, `\"left\"` or `\"outer\"`",
            "\"inner\"",
            "what happens to a record without a row: it ends here and is counted, or it goes on with null in place of the row. \
             `outer`, of two tables, also keeps rows of the other",
        ),
        key("into", "a name", "required", "the member that the row becomes; one that the record has is replaced"),
        key(
            "key",
            "VRL",
            "the record's key",
            "the key to look up by, as in `rekey`; records go through the topic `<name>.NAME.repartition` then, and have that \
             key afterwards",
        ),
        ON_ERROR,
    ],
};

pub const FIELD: Section = Section {
    title: "`fields = { NAME = { … } }`",
    doc: "One function of a VRL expression. Numbers are exact within 128 bits and 38 decimals; a value that would leave \
     them rejects its record (`overflow`).",
    keys: &[
        key("sum", "VRL", "", "the sum of numbers; 0 at first"),
        key("min", "VRL", "", "the least of numbers, or of strings"),
        key("max", "VRL", "", "the greatest of numbers, or of strings"),
        key("avg", "VRL", "", "the average of numbers, to six decimals beyond their own"),
        key("first", "VRL", "", "the first value, of any kind"),
        key("last", "VRL", "", "the last value, of any kind"),
        key("distinct_count", "VRL", "", "how many different strings, numbers and booleans, up to `limit`"),
        key("collect", "VRL", "", "an array of the values in their order, up to `limit`"),
        key(
            "reduce",
            "VRL",
            "",
            "what an expression makes of `.acc`, its former value (null at first), and `.value`, the record's; null leaves it \
             as it is",
        ),
        key(
            "merge",
            "VRL",
            "required for `reduce` with `session`",
            "what the values of two sessions that become one come to: `.acc` is the earlier one's, `.other` the later one's",
        ),
        key(
            "limit",
            "1 to 100000",
            "1000",
            "how many values `distinct_count` and `collect` keep; the record that brings another is rejected (`limit`)",
        ),
    ],
};
