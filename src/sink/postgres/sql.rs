//! The statements of the sink. Rows travel as one array a column, so that one text serves every batch size and no
//! limit on parameters is near.

use super::layout::{Layout, quoted};

/// The statements of a layout. All take the same arrays, in the order of its columns.
#[derive(Clone, Debug)]
pub struct Statements {
    /// Inserts rows, or updates those whose version in the table is lower.
    pub upsert: String,
    /// The same for batches that are mostly in the table already: rows that would lose are left out before they lock
    /// (and log) anything. The guard still decides on the locked row.
    pub replay: String,
    /// Counts rows that the table holds in the same version with other content.
    pub ties: String,
}

impl Statements {
    pub fn new(layout: &Layout) -> Statements {
        let names: Vec<String> = layout.columns.iter().map(|c| quoted(&c.name)).collect();
        let values: Vec<String> = (0..names.len()).map(|at| value(layout, at)).collect();
        let version = &names[layout.version];
        let key_matches = |table: &str| {
            let columns = layout.key.iter().map(|&k| format!("{table}.{} = {}", names[k], values[k]));
            columns.collect::<Vec<_>>().join(" AND ")
        };
        let (rows, ordered) = (unnest(layout, false), unnest(layout, true));
        let insert = format!(
            "INSERT INTO {} AS semel_t ({}) SELECT {} FROM ",
            layout.quoted_table,
            names.join(", "),
            values.join(", "),
        );
        let conflict = format!(
            " ON CONFLICT ({}) DO UPDATE SET {} WHERE semel_t.{version} < excluded.{version}",
            layout.key.iter().map(|&k| names[k].as_str()).collect::<Vec<_>>().join(", "),
            updates(layout, &names),
        );
        // The anti-join may reorder rows, and with them the locks: ask for the order of the arrays.
        let prefilter = format!(
            " WHERE NOT EXISTS (SELECT FROM {} semel_x WHERE {} AND semel_x.{version} >= {}) ORDER BY semel_u.ord",
            layout.quoted_table,
            key_matches("semel_x"),
            values[layout.version],
        );
        let ties = format!(
            "SELECT count(*) FROM {rows} JOIN {} semel_t ON {} WHERE semel_t.{version} = {} AND ({})",
            layout.quoted_table,
            key_matches("semel_t"),
            values[layout.version],
            differences(layout, &names, &values),
        );
        Statements {
            upsert: format!("{insert}{rows}{conflict}"),
            replay: format!("{insert}{ordered}{prefilter}{conflict}"),
            ties,
        }
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

fn updates(layout: &Layout, names: &[String]) -> String {
    let payload = (0..names.len()).filter(|at| !layout.key.contains(at));
    payload.map(|at| format!("{0} = excluded.{0}", names[at])).collect::<Vec<_>>().join(", ")
}

fn differences(layout: &Layout, names: &[String], values: &[String]) -> String {
    let payload = (0..names.len()).filter(|at| !layout.key.contains(at) && *at != layout.version);
    let compared = payload.map(|at| {
        let column = &layout.columns[at];
        let differs = if column.ty.comparable() {
            format!("semel_t.{} IS DISTINCT FROM {}", names[at], values[at])
        } else {
            format!("semel_t.{}::text IS DISTINCT FROM ({})::text", names[at], values[at])
        };
        if column.may_be_filled { format!("semel_u.c{at} IS NOT NULL AND {differs}") } else { differs }
    });
    let compared = compared.collect::<Vec<_>>();
    if compared.is_empty() { "false".into() } else { compared.join(" OR ") }
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
            key: vec![0],
            version: 2,
            deleted: None,
        };
        let statements = Statements::new(&layout);
        let insert = "INSERT INTO \"s\".\"T\" AS semel_t (\"id\", \"we\"\"ird\", \"v\", \"since\") \
                      SELECT semel_u.c0, semel_u.c1::numeric, semel_u.c2, coalesce(semel_u.c3, now()) FROM ";
        let rows = "unnest($1::uuid[], $2::text[], $3::int8[], $4::timestamptz[])";
        let conflict = " ON CONFLICT (\"id\") DO UPDATE SET \"we\"\"ird\" = excluded.\"we\"\"ird\", \
                        \"v\" = excluded.\"v\", \"since\" = excluded.\"since\" WHERE semel_t.\"v\" < excluded.\"v\"";
        assert_eq!(statements.upsert, format!("{insert}{rows} AS semel_u(c0, c1, c2, c3){conflict}"));
        assert_eq!(
            statements.replay,
            format!(
                "{insert}{rows} WITH ORDINALITY AS semel_u(c0, c1, c2, c3, ord) WHERE NOT EXISTS (SELECT FROM \
                 \"s\".\"T\" semel_x WHERE semel_x.\"id\" = semel_u.c0 AND semel_x.\"v\" >= semel_u.c2) \
                 ORDER BY semel_u.ord{conflict}"
            )
        );
        assert!(statements.ties.ends_with(
            "WHERE semel_t.\"v\" = semel_u.c2 AND (semel_t.\"we\"\"ird\" IS DISTINCT FROM semel_u.c1::numeric OR \
             semel_u.c3 IS NOT NULL AND semel_t.\"since\" IS DISTINCT FROM coalesce(semel_u.c3, now()))"
        ));
    }
}
