//! The statements of the sink. Rows travel as one array a column, so that one text serves every batch size and no
//! limit on parameters is near.

use super::layout::{Layout, quoted};
use crate::topology::spec::Mode;

/// The statements of a layout. All take the same arrays, in the order of its columns.
#[derive(Clone, Debug)]
pub struct Statements {
    /// Writes rows: what that means is the layout's mode.
    pub write: String,
    /// The same for batches that are mostly in the table already: rows that would lose are left out before they lock
    /// (and log) anything. The guard still decides on the locked row.
    pub replay: Option<String>,
    /// Counts rows that the table holds in the same version with other content.
    pub ties: Option<String>,
}

impl Statements {
    pub fn new(layout: &Layout) -> Statements {
        let sql = Sql::new(layout);
        let (write, replay) = match layout.mode {
            Mode::Upsert => (sql.upsert(false), Some(sql.upsert(true))),
            Mode::Insert => (sql.insert(), None),
            Mode::Add => (sql.add(), None),
            Mode::Update => (sql.update(), None),
        };
        Statements { write, replay, ties: layout.version.map(|version| sql.ties(version)) }
    }
}

/// A layout's columns in SQL.
struct Sql<'l> {
    layout: &'l Layout,
    names: Vec<String>,
    values: Vec<String>,
}

impl Sql<'_> {
    fn new(layout: &Layout) -> Sql<'_> {
        let names = layout.columns.iter().map(|c| quoted(&c.name)).collect();
        let values = (0..layout.columns.len()).map(|at| value(layout, at)).collect();
        Sql { layout, names, values }
    }

    fn target(&self) -> &str {
        &self.layout.quoted_table
    }

    fn into(&self) -> String {
        format!("INSERT INTO {} AS semel_t ({})", self.target(), self.names.join(", "))
    }

    fn insert(&self) -> String {
        format!("{} SELECT {} FROM {}", self.into(), self.values.join(", "), unnest(self.layout, false))
    }

    fn upsert(&self, replay: bool) -> String {
        let rows = unnest(self.layout, replay);
        let prefilter = match self.layout.version.filter(|_| replay) {
            // The anti-join may reorder rows, and with them the locks: ask for the order of the arrays.
            Some(version) => format!(
                " WHERE NOT EXISTS (SELECT FROM {} semel_x WHERE {} AND semel_x.{} >= {}) ORDER BY semel_u.ord",
                self.target(),
                self.key_matches("semel_x"),
                self.names[version],
                self.values[version],
            ),
            None => String::new(),
        };
        format!(
            "{} SELECT {} FROM {rows}{prefilter} ON CONFLICT ({}) DO UPDATE SET {}{}",
            self.into(),
            self.values.join(", "),
            self.key(),
            self.set(|at| format!("excluded.{}", self.names[at])),
            self.guard(|at| format!("excluded.{}", self.names[at]))
                .map_or(String::new(), |guard| format!(" WHERE {guard}")),
        )
    }

    /// Sums a key's rows first: one statement cannot touch a row twice. Rows that are there are updated and only the
    /// others inserted: an upsert would hold its constraints against what is added instead of the sum.
    fn add(&self) -> String {
        let keys: Vec<&str> = self.layout.key.iter().map(|&k| self.values[k].as_str()).collect();
        let summed = (0..self.values.len()).map(|at| match self.layout.key.contains(&at) {
            true => format!("{} AS c{at}", self.values[at]),
            false => format!("coalesce(sum({}), 0) AS c{at}", self.values[at]),
        });
        let sums: Vec<String> = (0..self.values.len()).map(|at| format!("semel_u.c{at}")).collect();
        let of = |new: &dyn Fn(usize) -> String| {
            self.set(|at| format!("coalesce(semel_t.{}, 0) + {}", self.names[at], new(at)))
        };
        format!(
            "WITH semel_s AS MATERIALIZED (SELECT {}, min(semel_u.ord) AS ord FROM {} GROUP BY {}), \
             semel_l AS MATERIALIZED (SELECT semel_u.* FROM semel_s AS semel_u JOIN {target} semel_t ON {matches} \
             ORDER BY semel_u.ord FOR UPDATE OF semel_t), \
             semel_d AS (UPDATE {target} AS semel_t SET {} FROM semel_l AS semel_u WHERE {matches} \
             RETURNING semel_u.ord) {} SELECT {} FROM semel_s AS semel_u \
             WHERE NOT EXISTS (SELECT FROM semel_d d WHERE d.ord = semel_u.ord) \
             ORDER BY semel_u.ord ON CONFLICT ({}) DO UPDATE SET {}",
            summed.collect::<Vec<_>>().join(", "),
            unnest(self.layout, true),
            keys.join(", "),
            of(&|at| sums[at].clone()),
            self.into(),
            sums.join(", "),
            self.key(),
            of(&|at| format!("excluded.{}", self.names[at])),
            target = self.target(),
            matches = self.key_matches("semel_t"),
        )
    }

    /// Locks the rows in the order of the arrays first; a join alone takes them as it finds them.
    fn update(&self) -> String {
        let condition = self.guard(|at| self.values[at].clone()).unwrap_or_else(|| self.differences(None));
        format!(
            "WITH semel_l AS MATERIALIZED (SELECT semel_u.* FROM {} JOIN {} semel_t ON {} ORDER BY semel_u.ord \
             FOR UPDATE OF semel_t) UPDATE {} AS semel_t SET {} FROM semel_l AS semel_u WHERE {} AND ({condition})",
            unnest(self.layout, true),
            self.target(),
            self.key_matches("semel_t"),
            self.target(),
            self.set(|at| self.values[at].clone()),
            self.key_matches("semel_t"),
        )
    }

    fn ties(&self, version: usize) -> String {
        format!(
            "SELECT count(*) FROM {} JOIN {} semel_t ON {} WHERE semel_t.{} = {} AND ({})",
            unnest(self.layout, false),
            self.target(),
            self.key_matches("semel_t"),
            self.names[version],
            self.values[version],
            self.differences(Some(version)),
        )
    }

    fn key(&self) -> String {
        self.layout.key.iter().map(|&k| self.names[k].as_str()).collect::<Vec<_>>().join(", ")
    }

    fn key_matches(&self, table: &str) -> String {
        let columns = self.layout.key.iter().map(|&k| format!("{table}.{} = {}", self.names[k], self.values[k]));
        columns.collect::<Vec<_>>().join(" AND ")
    }

    /// `name = …` for every column but the key; `new` makes the value of the column's number.
    fn set(&self, new: impl Fn(usize) -> String) -> String {
        let payload = (0..self.names.len()).filter(|at| !self.layout.key.contains(at));
        payload.map(|at| format!("{} = {}", self.names[at], new(at))).collect::<Vec<_>>().join(", ")
    }

    /// `new` makes the new version.
    fn guard(&self, new: impl Fn(usize) -> String) -> Option<String> {
        self.layout.version.map(|at| format!("semel_t.{} < {}", self.names[at], new(at)))
    }

    fn differences(&self, version: Option<usize>) -> String {
        let payload = (0..self.names.len()).filter(|at| !self.layout.key.contains(at) && Some(*at) != version);
        let compared = payload.map(|at| {
            let column = &self.layout.columns[at];
            let differs = if column.ty.comparable() {
                format!("semel_t.{} IS DISTINCT FROM {}", self.names[at], self.values[at])
            } else {
                format!("semel_t.{}::text IS DISTINCT FROM ({})::text", self.names[at], self.values[at])
            };
            if column.may_be_filled { format!("semel_u.c{at} IS NOT NULL AND {differs}") } else { differs }
        });
        let compared = compared.collect::<Vec<_>>();
        if compared.is_empty() { "false".into() } else { compared.join(" OR ") }
    }
}

/// `unnest($1::text[], …) AS semel_u(c0, …)`; `ordered` numbers the rows in another column `ord`.
fn unnest(layout: &Layout, ordered: bool) -> String {
    let (mut arrays, mut columns) = (Vec::new(), Vec::new());
    for (at, column) in layout.columns.iter().enumerate() {
        let array = column.ty.array();
        // The name of an array type in the catalog is its element's with an underscore in front.
        arrays.push(format!("${}::{}[]", at + 1, array.name().trim_start_matches('_')));
        columns.push(format!("c{at}"));
    }
    columns.extend(ordered.then(|| "ord".into()));
    let ordinality = if ordered { " WITH ORDINALITY" } else { "" };
    format!("unnest({}){ordinality} AS semel_u({})", arrays.join(", "), columns.join(", "))
}

/// What goes into column `at`: the array's element, cast, or the column's default in the place of a null.
fn value(layout: &Layout, at: usize) -> String {
    let column = &layout.columns[at];
    let cast = column.ty.cast().map_or(String::new(), |ty| format!("::{ty}"));
    match &column.default {
        Some(default) => format!("coalesce(semel_u.c{at}{cast}, {default})"),
        None => format!("semel_u.c{at}{cast}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Column, Type};
    use super::*;

    fn column(name: &str, ty: Type) -> Column {
        Column { name: name.into(), ty, required: false, default: None, may_be_filled: false }
    }

    #[test]
    fn names_are_quoted_and_the_guard_is_strict() {
        let mut since = column("since", Type::TimestampTz { digits: 6 });
        since.default = Some("now()".into());
        since.may_be_filled = true;
        let layout = Layout {
            node: "n".into(),
            table: "s.T".into(),
            quoted_table: "\"s\".\"T\"".into(),
            columns: vec![
                column("id", Type::Uuid),
                column("we\"ird", Type::Numeric { limits: None }),
                column("v", Type::Int8),
                since,
            ],
            mode: Mode::Upsert,
            key: vec![0],
            version: Some(2),
            deleted: None,
        };
        let statements = Statements::new(&layout);
        let insert = "INSERT INTO \"s\".\"T\" AS semel_t (\"id\", \"we\"\"ird\", \"v\", \"since\") \
                      SELECT semel_u.c0, semel_u.c1::numeric, semel_u.c2, coalesce(semel_u.c3, now()) FROM ";
        let rows = "unnest($1::uuid[], $2::text[], $3::int8[], $4::timestamptz[])";
        let conflict = " ON CONFLICT (\"id\") DO UPDATE SET \"we\"\"ird\" = excluded.\"we\"\"ird\", \
                        \"v\" = excluded.\"v\", \"since\" = excluded.\"since\" WHERE semel_t.\"v\" < excluded.\"v\"";
        assert_eq!(statements.write, format!("{insert}{rows} AS semel_u(c0, c1, c2, c3){conflict}"));
        assert_eq!(
            statements.replay.unwrap(),
            format!(
                "{insert}{rows} WITH ORDINALITY AS semel_u(c0, c1, c2, c3, ord) WHERE NOT EXISTS (SELECT FROM \
                 \"s\".\"T\" semel_x WHERE semel_x.\"id\" = semel_u.c0 AND semel_x.\"v\" >= semel_u.c2) \
                 ORDER BY semel_u.ord{conflict}"
            )
        );
        assert!(statements.ties.unwrap().ends_with(
            "WHERE semel_t.\"v\" = semel_u.c2 AND (semel_t.\"we\"\"ird\" IS DISTINCT FROM semel_u.c1::numeric OR \
             semel_u.c3 IS NOT NULL AND semel_t.\"since\" IS DISTINCT FROM coalesce(semel_u.c3, now()))"
        ));
        // Without a guard only what differs is set.
        let update = Statements::new(&Layout { mode: Mode::Update, version: None, ..layout.clone() });
        assert!(update.ties.is_none());
        assert!(update.write.ends_with(
            "WHERE semel_t.\"id\" = semel_u.c0 AND (semel_t.\"we\"\"ird\" IS DISTINCT FROM semel_u.c1::numeric OR \
             semel_t.\"v\" IS DISTINCT FROM semel_u.c2 OR semel_u.c3 IS NOT NULL AND semel_t.\"since\" IS DISTINCT \
             FROM coalesce(semel_u.c3, now()))"
        ));
        let guarded = Statements::new(&Layout { mode: Mode::Update, ..layout });
        assert!(guarded.write.ends_with("WHERE semel_t.\"id\" = semel_u.c0 AND (semel_t.\"v\" < semel_u.c2)"));
    }
}
