//! Files of the repository that hold what the program should say.

/// Compares a file of the repository with what it should hold; with `SEMEL_UPDATE=1` it is written instead.
pub fn golden(path: &str, actual: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("SEMEL_UPDATE").is_some() {
        std::fs::write(&path, actual).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let hint = "run with SEMEL_UPDATE=1 and read the difference that git shows";
    let first = expected.lines().zip(actual.lines()).position(|(e, a)| e != a);
    let line = first.unwrap_or(expected.lines().count().min(actual.lines().count()));
    let at = |text: &str| text.lines().nth(line).unwrap_or("(end)").to_owned();
    assert!(
        expected == actual,
        "{} differs in line {}:\n  expected {}\n  actual   {}\n{hint}",
        path.display(),
        line + 1,
        at(&expected),
        at(actual)
    );
}
