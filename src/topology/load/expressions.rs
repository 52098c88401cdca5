//! VRL in the file: compiled where it stands, its messages placed in the TOML text.

use toml::de::DeValue;

use super::cx::{Cx, Item, Table};
use super::toml_string::StringMap;
use crate::expr::{self, Program, Role};
use crate::topology::finding::{Severity, code};

impl Cx<'_> {
    /// Compiles the expression under `name`. Expressions are not interpolated.
    pub fn expression(&mut self, table: &Table<'_>, name: &str, role: Role) -> Option<Program> {
        let item = table.get(name)?;
        self.expression_item(name, item, role)
    }

    pub fn required_expression(&mut self, table: &Table<'_>, name: &str, role: Role, help: &str) -> Option<Program> {
        if table.get(name).is_none() {
            self.missing(table, name, help);
        }
        self.expression(table, name, role)
    }

    pub fn expression_item(&mut self, name: &str, item: &Item<'_>, role: Role) -> Option<Program> {
        let DeValue::String(source) = item.get_ref() else {
            self.wrong_type(name, item, "an expression in a string, such as '.status'");
            return None;
        };
        if source.trim().is_empty() {
            self.found.error(code::INVALID_VALUE, item.span(), format!("the expression of `{name}` is empty"));
            return None;
        }
        let span = item.span();
        let map = StringMap::new(self.text.get(span.clone()).unwrap_or(""), source);
        if let Some(at) = source.find("${") {
            let start = span.start + map.place(at);
            self.found
                .warning(code::EXPRESSION_VARIABLE, start..start + 2, "expressions are not interpolated")
                .help("in VRL `${` has no meaning; put what depends on the environment into another setting");
        }
        let (program, diagnostics) = match expr::compile(source, role) {
            Ok((program, warnings)) => (Some(program), warnings),
            Err(errors) => (None, errors),
        };
        for diagnostic in diagnostics {
            let start = span.start + map.place(diagnostic.span.start);
            let end = (span.start + map.place(diagnostic.span.end)).max(start);
            let severity = if diagnostic.error { Severity::Error } else { Severity::Warning };
            self.found.add(severity, code::EXPRESSION, start..end, diagnostic.message).maybe_help(diagnostic.help);
        }
        program
    }
}
