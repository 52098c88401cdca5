//! `${NAME}`, `${NAME:-default}` and `$$` in strings.

/// A string with its variables put in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interpolated {
    pub value: String,
    /// Variables that have neither value nor default, with the byte of the string where each stands.
    pub unset: Vec<(String, usize)>,
    /// Where a `${` is not closed or holds no name, with what is wrong.
    pub invalid: Vec<(usize, &'static str)>,
    /// Whether the string named a variable at all: then its value may be a secret and is never shown.
    pub variables: bool,
}

/// Puts the variables of `env` into `text`. A variable that is unset or empty takes its default, as in a shell; one
/// without either is left as it stands. A `$` before anything else than `{` or `$` is itself.
pub fn interpolate(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Interpolated {
    let mut out = Interpolated::default();
    let mut at = 0;
    while let Some(found) = text[at..].find('$') {
        let dollar = at + found;
        out.value.push_str(&text[at..dollar]);
        let rest = &text[dollar + 1..];
        if rest.starts_with('$') {
            out.value.push('$');
            at = dollar + 2;
        } else if let Some(inner) = rest.strip_prefix('{') {
            let Some(end) = inner.find('}') else {
                out.invalid.push((dollar, "`${` is not closed by `}`"));
                at = text.len();
                break;
            };
            variable(&inner[..end], dollar, env, &mut out);
            at = dollar + 2 + end + 1;
        } else {
            out.value.push('$');
            at = dollar + 1;
        }
    }
    out.value.push_str(&text[at..]);
    out
}

fn variable(inner: &str, dollar: usize, env: &dyn Fn(&str) -> Option<String>, out: &mut Interpolated) {
    let (name, default) = match inner.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inner, None),
    };
    let head = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !head || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        out.invalid.push((dollar, "`${…}` takes a variable's name, then perhaps `:-` and a default"));
        return;
    }
    out.variables = true;
    match (env(name), default) {
        (Some(value), None) => out.value.push_str(&value),
        (Some(value), Some(_)) if !value.is_empty() => out.value.push_str(&value),
        (_, Some(default)) => out.value.push_str(default),
        (None, None) => {
            out.unset.push((name.to_owned(), dollar));
            out.value.push_str("${");
            out.value.push_str(name);
            out.value.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        match name {
            "HOST" => Some("db".into()),
            "EMPTY" => Some(String::new()),
            "TRICK" => Some("${HOST}$$".into()),
            _ => None,
        }
    }

    fn value(text: &str) -> String {
        interpolate(text, &env).value
    }

    #[test]
    fn variables_defaults_and_escapes() {
        assert_eq!(value("postgres://${HOST}:5432"), "postgres://db:5432");
        assert_eq!(value("${NONE:-localhost:9092}"), "localhost:9092");
        assert_eq!(value("[${EMPTY}] [${EMPTY:-x}] [${NONE:-}]"), "[] [x] []");
        assert_eq!(value("$${HOST} $$ $ $5"), "${HOST} $ $ $5");
        assert_eq!(value("${TRICK}"), "${HOST}$$", "a value is not interpolated again");
        assert_eq!(value("å${HOST}å"), "ådbå");
    }

    #[test]
    fn unset_and_malformed_variables_are_told_with_their_place() {
        let out = interpolate("a ${NONE} ${1X}", &env);
        assert_eq!(out.unset, [("NONE".to_owned(), 2)]);
        assert_eq!(out.value, "a ${NONE} ");
        assert_eq!(out.invalid[0].0, 10);
        assert_eq!(interpolate("x${HOST", &env).invalid, [(1, "`${` is not closed by `}`")]);
    }
}
