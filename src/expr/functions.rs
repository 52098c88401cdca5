//! The functions that expressions may call: VRL's standard library, less what would give another value on another
//! attempt where that matters.

use std::fmt;
use std::sync::LazyLock;

use vrl::compiler::function::closure::{Definition, Input, Output, Variable, VariableKind};
use vrl::compiler::function::{ArgumentList, Closure, Compiled, Example, FunctionCompileContext};
use vrl::compiler::value::kind;
use vrl::compiler::{
    Context, Expression, ExpressionError, Function, FunctionExpression, Parameter, Resolved, TypeDef, TypeState,
};
use vrl::value::Kind;

/// Functions whose value depends on more than the record, and on what.
const NONDETERMINISTIC: &[(&str, &str)] = &[
    ("now", "the clock"),
    ("parse_groks", "the clock, for dates without a year or an offset"),
    ("parse_klog", "the clock, for the year"),
    ("parse_linux_authorization", "the clock, for the year"),
    ("parse_syslog", "the clock, for dates without a year"),
    ("random_bool", "chance"),
    ("random_bytes", "chance"),
    ("random_float", "chance"),
    ("random_int", "chance"),
    ("shannon_entropy", "chance: it adds floating-point numbers in random order"),
    ("uuid_v4", "chance"),
    ("uuid_v7", "chance and the clock"),
];

/// Functions of VRL that are left out everywhere, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("dns_lookup", "it asks the network"),
    ("http_request", "it asks the network"),
    ("reverse_dns", "it asks the network"),
    ("get_env_var", "it reads the environment of the process; use `${NAME}` in a setting of the file"),
    ("get_hostname", "it differs from machine to machine"),
    ("get_timezone_name", "it differs from machine to machine"),
];

/// On what a function's value depends besides its arguments.
pub(super) fn nondeterminism(name: &str) -> Option<&'static str> {
    NONDETERMINISTIC.iter().find(|(n, _)| *n == name).map(|(_, why)| *why)
}

/// Why a function of VRL is not there.
pub(super) fn left_out(name: &str) -> Option<&'static str> {
    LEFT_OUT.iter().find(|(n, _)| *n == name).map(|(_, why)| *why)
}

type Functions = Vec<Box<dyn Function>>;

/// Every function of the build.
pub(super) fn all() -> &'static Functions {
    static ALL: LazyLock<Functions> = LazyLock::new(|| with_attempt(vrl::stdlib::all()));
    &ALL
}

/// Those that give the same value on every attempt.
pub(super) fn deterministic() -> &'static Functions {
    static SOME: LazyLock<Functions> = LazyLock::new(|| {
        let all = vrl::stdlib::all().into_iter();
        with_attempt(all.filter(|f| nondeterminism(f.identifier()).is_none()).collect())
    });
    &SOME
}

fn with_attempt(mut functions: Functions) -> Functions {
    functions.push(Box::new(Attempt));
    functions
}

/// Stands before and behind an expression whose error may pass.
///
/// VRL asks for every error to be handled in the program. In an expression that just gives a value the error is the
/// record's (`on_error`), so it has to come out: `??` satisfies the compiler, and before it swallows the error the
/// function tells the target of it.
pub(super) const ATTEMPT: (&str, &str) = ("(semel_attempt(null) -> |_x| {\n", "\n}) ?? null");

/// How [`Attempt`] tells the target that its closure failed, and that it aborted.
pub(super) const FAILED: &str = "semel_failed";
pub(super) const ABORTED: &str = "semel_aborted";

/// Runs its closure, and tells the target of an error.
#[derive(Clone, Copy, Debug)]
struct Attempt;

impl Function for Attempt {
    fn identifier(&self) -> &'static str {
        "semel_attempt"
    }

    fn usage(&self) -> &'static str {
        "Runs its closure once."
    }

    fn category(&self) -> &'static str {
        "Enumerate"
    }

    fn return_kind(&self) -> u16 {
        kind::ANY
    }

    fn examples(&self) -> &'static [Example] {
        &[]
    }

    fn parameters(&self) -> &'static [Parameter] {
        const PARAMETERS: &[Parameter] = &[Parameter::required("value", kind::ANY, "Not used.")];
        PARAMETERS
    }

    fn closure(&self) -> Option<Definition> {
        let example = Example {
            title: "",
            source: "",
            input: None,
            result: Ok(""),
            file: file!(),
            line: line!(),
            deterministic: true,
            skip: true,
        };
        Some(Definition {
            inputs: vec![Input {
                parameter_keyword: "value",
                kind: Kind::any(),
                variables: vec![Variable { kind: VariableKind::Exact(Kind::null()) }],
                output: Output::Kind(Kind::any()),
                example,
            }],
            is_iterator: false,
            supports_break: false,
        })
    }

    fn compile(&self, _: &TypeState, _: &mut FunctionCompileContext, arguments: ArgumentList) -> Compiled {
        Ok(AttemptExpression { closure: arguments.required_closure()? }.as_expr())
    }
}

#[derive(Clone, Debug)]
struct AttemptExpression {
    closure: Closure,
}

impl FunctionExpression for AttemptExpression {
    fn resolve(&self, ctx: &mut Context) -> Resolved {
        match self.closure.block.resolve(ctx) {
            Ok(value) | Err(ExpressionError::Return { value, .. }) => Ok(value),
            Err(error) => {
                let key = if matches!(error, ExpressionError::Abort { .. }) { ABORTED } else { FAILED };
                ctx.target_mut().insert_secret(key, &error.to_string());
                Err(error)
            }
        }
    }

    fn type_def(&self, _: &TypeState) -> TypeDef {
        let block = &self.closure.block_type_def;
        TypeDef::from(block.kind().union(block.returns().clone())).fallible()
    }
}

impl fmt::Display for AttemptExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("semel_attempt")
    }
}
