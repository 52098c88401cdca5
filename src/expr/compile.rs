//! Compiling an expression: VRL's compiler with our paths, our functions, and errors that may pass.

use std::ops::Range;
use std::sync::Arc;

use vrl::compiler::state::LocalEnv;
use vrl::compiler::unused_expression_checker::check_for_unused_results;
use vrl::compiler::{CompileConfig, TypeState, compile_with_state};
use vrl::diagnostic::{Diagnostic as VrlDiagnostic, DiagnosticList, Note};
use vrl::path::{OwnedSegment, OwnedTargetPath, PathPrefix};
use vrl::value::Kind;
use vrl::value::kind::Collection;

use super::analysis::{Analysis, Placed, analyze};
use super::program::{Compiled, Program};
use super::{Diagnostic, Role, Uses, functions, metadata};

/// VRL's codes for an unknown function and for a write to what is read-only.
const UNDEFINED_FUNCTION: usize = 105;
const READ_ONLY: usize = 315;

/// Compiles an expression. Warnings come beside the program, errors instead of it.
///
/// In `.` it sees an object; an expression that does not compile so is tried with a string, as `string` and `bytes`
/// records are ([`Uses::text`] tells). Only a `remap` has to handle errors itself: where an expression just gives a
/// value, its error is the record's (`on_error`).
pub fn compile(source: &str, role: Role) -> Result<(Program, Vec<Diagnostic>), Vec<Diagnostic>> {
    let source_program = vrl::parser::parse(source)
        .map_err(|e| translate(DiagnosticList::from(vec![Box::new(e) as Box<_>]), source, role, 0))?;
    let unused = check_for_unused_results(&source_program);
    let analysis = analyze(source_program, role == Role::Remap);

    let object = Kind::object(Collection::any());
    let (compiled, text) = match build(source, role, object, &analysis) {
        Ok(compiled) => (compiled, false),
        Err(errors) => match build(source, role, Kind::bytes(), &analysis) {
            Ok(compiled) => (compiled, true),
            Err(_) => return Err(with(unknown_metadata(&analysis), errors)),
        },
    };
    let mut errors = unknown_metadata(&analysis);
    errors.extend(wrong_type(&compiled.program, role, &analysis));
    if !errors.is_empty() {
        return Err(errors);
    }

    let mut warnings = translate(unused, source, role, 0);
    warnings.extend(compiled.warnings.into_iter().filter(|w| !w.error));
    let inner = Compiled {
        source: source.to_owned(),
        role,
        program: compiled.program,
        uses: uses(&analysis, text),
        exact: role == Role::Value || role == Role::Expand || !analysis.writes.is_empty(),
        discards: analysis.discards,
        path: analysis.path,
        comparison: analysis.comparison,
    };
    Ok((Program { inner: Arc::new(inner) }, warnings))
}

fn with(mut first: Vec<Diagnostic>, second: Vec<Diagnostic>) -> Vec<Diagnostic> {
    first.extend(second);
    first
}

struct Built {
    program: vrl::compiler::Program,
    warnings: Vec<Diagnostic>,
}

/// Compiles for a `.` of the given kind: as it is, or else as an attempt whose error passes.
fn build(source: &str, role: Role, kind: Kind, analysis: &Analysis) -> Result<Built, Vec<Diagnostic>> {
    let functions = if role == Role::Value { functions::deterministic() } else { functions::all() };
    let state = TypeState { local: LocalEnv::default(), external: metadata::environment(kind) };
    let compile = |text: &str, shift: usize| match compile_with_state(text, functions, &state, config(role)) {
        Ok(result) => Ok(Built { program: result.program, warnings: translate(result.warnings, source, role, shift) }),
        Err(errors) => Err(translate(errors, source, role, shift)),
    };
    compile(source, 0).or_else(|errors| {
        if role == Role::Remap || analysis.syntax_error {
            return Err(errors);
        }
        let (before, after) = functions::ATTEMPT;
        compile(&format!("{before}{source}{after}"), before.len())
    })
}

fn config(role: Role) -> CompileConfig {
    let mut config = CompileConfig::default();
    config.disable_unused_expression_check();
    config.set_read_only_path(OwnedTargetPath::metadata_root(), true);
    if matches!(role, Role::Condition | Role::Value) {
        config.set_read_only_path(OwnedTargetPath::event_root(), true);
    }
    config
}

/// An expression that can never give what its place needs.
fn wrong_type(program: &vrl::compiler::Program, role: Role, analysis: &Analysis) -> Option<Diagnostic> {
    let result = program.final_type_info().result;
    let kind = result.kind().union(result.returns().clone());
    let (fits, needs) = match role {
        Role::Condition => (kind.contains_boolean(), "a condition must be true or false"),
        Role::Expand => (kind.contains_array(), "the expression must give an array, one record an element"),
        Role::Remap | Role::Value => return None,
    };
    if fits || kind.is_never() {
        return None;
    }
    Some(Diagnostic {
        error: true,
        message: format!("{needs}, but this gives {}", kind),
        span: analysis.result.clone(),
        help: None,
    })
}

fn unknown_metadata(analysis: &Analysis) -> Vec<Diagnostic> {
    let unknown = |(path, span): &Placed<OwnedTargetPath>| {
        if path.prefix != PathPrefix::Metadata {
            return None;
        }
        let name = match path.path.segments.first()? {
            OwnedSegment::Field(name) if metadata::NAMES.contains(&name.as_str()) => return None,
            OwnedSegment::Field(name) => name.to_string(),
            OwnedSegment::Index(index) => format!("[{index}]"),
        };
        let nearest = metadata::NAMES.iter().find(|known| resembles(&name, known));
        let all = metadata::NAMES.map(|n| format!("%{n}")).join(", ");
        let help = nearest.map_or(format!("there are {all}"), |n| format!("did you mean `%{n}`? There are {all}"));
        Some(Diagnostic {
            error: true,
            message: format!("unknown metadata `%{name}`"),
            span: span.clone(),
            help: Some(help),
        })
    };
    analysis.reads.iter().chain(&analysis.writes).filter_map(unknown).collect()
}

/// Two edits apart at most, and not just any short word.
fn resembles(name: &str, known: &str) -> bool {
    let (a, b): (Vec<char>, Vec<char>) = (name.chars().collect(), known.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let edit = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], edit);
        }
    }
    row[b.len()] <= 2 && row[b.len()] < known.len()
}

fn uses(analysis: &Analysis, text: bool) -> Uses {
    let functions = analysis.functions.iter().map(|(name, _)| name);
    let mut nondeterministic: Vec<String> =
        functions.filter(|name| functions::nondeterminism(name).is_some()).cloned().collect();
    nondeterministic.sort();
    nondeterministic.dedup();
    let names = |paths: &[Placed<OwnedTargetPath>]| {
        let mut names: Vec<String> = paths.iter().map(|(path, _)| path.to_string()).collect();
        names.sort();
        names.dedup();
        names
    };
    let reads = names(&analysis.reads);
    let whole = analysis.functions.iter().any(|(name, _)| name == "unnest");
    Uses {
        nondeterministic_functions: nondeterministic,
        offset_or_partition: reads.iter().any(|r| {
            let head = r.split(['.', '[']).next().unwrap_or(r);
            matches!(head, "%" | "%offset" | "%partition")
        }),
        value: whole || analysis.reads.iter().any(|(path, _)| path.prefix == PathPrefix::Event),
        reads,
        writes: names(&analysis.writes),
        text,
    }
}

/// VRL's diagnostics as ours; `shift` is what stood before the expression's own text.
fn translate(list: DiagnosticList, source: &str, role: Role, shift: usize) -> Vec<Diagnostic> {
    list.into_iter().map(|diagnostic| one(&diagnostic, source, role, shift)).collect()
}

fn one(diagnostic: &VrlDiagnostic, source: &str, role: Role, shift: usize) -> Diagnostic {
    let primary = diagnostic.labels.iter().find(|l| l.primary).or(diagnostic.labels.first());
    let end = source.len();
    let span = primary.map_or(0..end, |label| {
        let place = |at: usize| floor(source, at.saturating_sub(shift).min(end));
        let span = place(label.span.start())..place(label.span.end());
        if span.start > span.end { span.end..span.end } else { span }
    });
    // VRL counts the sign of the assignment in.
    let shown = source[span.clone()].trim_end_matches([' ', '|', '=']).len();
    let span = if diagnostic.code == READ_ONLY { span.start..span.start + shown } else { span };
    let error = diagnostic.is_problem();
    if diagnostic.code == UNDEFINED_FUNCTION
        && let Some(known) = unavailable(&source[span.clone()], role)
    {
        return Diagnostic { error, message: known, span, help: None };
    }
    let detail =
        primary.map(|l| &l.message).filter(|m| !m.is_empty() && **m != diagnostic.message && !m.starts_with("help: "));
    let message = detail.map_or(diagnostic.message.clone(), |detail| format!("{}: {detail}", diagnostic.message));
    Diagnostic { error, message, help: help(diagnostic, detail, role, &span, source), span }
}

/// Byte positions of VRL's lexer are right, but a panic in a message would be worse than a wrong column.
fn floor(source: &str, at: usize) -> usize {
    (0..=at).rev().find(|i| source.is_char_boundary(*i)).unwrap_or(0)
}

fn unavailable(function: &str, role: Role) -> Option<String> {
    if role == Role::Value
        && let Some(why) = functions::nondeterminism(function)
    {
        return Some(format!(
            "`{function}` is not available here: the value must be the same on every attempt, and it depends on {why}"
        ));
    }
    functions::left_out(function).map(|why| format!("`{function}` is not available: {why}"))
}

fn help(
    diagnostic: &VrlDiagnostic,
    detail: Option<&String>,
    role: Role,
    span: &Range<usize>,
    source: &str,
) -> Option<String> {
    if diagnostic.code == READ_ONLY {
        let metadata = source[span.start..].trim_start_matches("del(").starts_with('%');
        let reader = !metadata && matches!(role, Role::Condition | Role::Value);
        let help = if reader {
            "this expression only reads; a `remap` transform changes records"
        } else {
            "metadata is read-only; a `rekey` transform changes the key"
        };
        return Some(help.into());
    }
    let labels = diagnostic.labels.iter().map(|l| &l.message).filter(|m| Some(*m) != detail).cloned();
    let said =
        |note: &&Note| matches!(note, Note::Hint(_) | Note::Example(_) | Note::Basic(_) | Note::UserErrorMessage(_));
    let notes = diagnostic.notes.iter().filter(said).map(ToString::to_string);
    let parts = labels.chain(notes).map(|part| part.trim().trim_start_matches("help: ").to_owned());
    let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}
