//! What an expression uses, read from its syntax tree: functions, paths, and deletions whose value nobody looks at.

use std::ops::Range;

use vrl::diagnostic::Span;
use vrl::parser::ast::{
    Assignment, AssignmentTarget, Block, Container, Expr, FunctionCall, IfStatement, Literal, Node, Opcode, Predicate,
    Query, QueryTarget, RootExpr, Unary,
};
use vrl::path::{OwnedSegment, OwnedTargetPath, OwnedValuePath, PathPrefix};

/// A name or path and its place in the expression's text.
pub(super) type Placed<T> = (T, Range<usize>);

#[derive(Clone, Debug, Default)]
pub(super) struct Analysis {
    pub(super) functions: Vec<Placed<String>>,
    pub(super) reads: Vec<Placed<OwnedTargetPath>>,
    pub(super) writes: Vec<Placed<OwnedTargetPath>>,
    /// Paths of `del` calls whose result nobody uses: removing is not reading there.
    pub(super) discards: Vec<OwnedTargetPath>,
    /// The whole expression is one path.
    pub(super) path: Option<OwnedTargetPath>,
    /// The whole expression compares a member with a text.
    pub(super) comparison: Option<Comparison>,
    /// Where the last expression stands: what the program gives.
    pub(super) result: Range<usize>,
    pub(super) syntax_error: bool,
}

/// `.member == "text"`, or `!=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Comparison {
    pub(super) member: String,
    pub(super) text: String,
    pub(super) equal: bool,
}

/// `effect_only`: nobody uses the value of the program itself.
pub(super) fn analyze(program: vrl::parser::Program, effect_only: bool) -> Analysis {
    let mut analysis = Analysis::default();
    let count = program.0.len();
    for (i, root) in program.0.into_iter().enumerate() {
        analysis.result = root.span().range();
        match root.into_inner() {
            RootExpr::Error(_) => analysis.syntax_error = true,
            RootExpr::Expr(node) => {
                if count == 1 {
                    analysis.path = external_query(&node).map(|(path, _)| path);
                    analysis.comparison = comparison(&node);
                }
                if effect_only || i + 1 < count { analysis.statement(node) } else { analysis.expr(node) }
            }
        }
    }
    let Analysis { reads, discards, .. } = &mut analysis;
    // The same path deleted for its value elsewhere shows among the reads.
    discards.retain(|path| !reads.iter().any(|(read, _)| read == path));
    analysis
}

fn external_query(node: &Node<Expr>) -> Option<Placed<OwnedTargetPath>> {
    let Expr::Query(query) = node.inner() else { return None };
    let QueryTarget::External(prefix) = query.target.inner() else { return None };
    let path = OwnedTargetPath { prefix: *prefix, path: query.path.inner().clone() };
    Some((path, node.span().range()))
}

fn comparison(node: &Node<Expr>) -> Option<Comparison> {
    let Expr::Op(op) = node.inner() else { return None };
    let op = op.inner();
    let equal = match op.1.inner() {
        Opcode::Eq => true,
        Opcode::Ne => false,
        _ => return None,
    };
    let (path, _) = external_query(&op.0).filter(|(path, _)| path.prefix == PathPrefix::Event)?;
    let [OwnedSegment::Field(member)] = &path.path.segments[..] else { return None };
    let Expr::Literal(literal) = op.2.inner() else { return None };
    let Literal::String(text) = literal.inner() else { return None };
    Some(Comparison { member: member.to_string(), text: text.as_literal_string()?.to_owned(), equal })
}

impl Analysis {
    /// An expression whose value nobody uses.
    fn statement(&mut self, node: Node<Expr>) {
        match node.into_inner() {
            Expr::FunctionCall(call) if is_plain_del(&call) => {
                let call = call.into_inner();
                self.functions.push((call.ident.to_string(), call.ident.span().range()));
                if let Some((path, span)) = call.arguments.first().and_then(|a| external_query(&a.inner().expr)) {
                    self.discards.push(path.clone());
                    self.writes.push((path, span));
                }
            }
            Expr::IfStatement(statement) => self.condition(statement.into_inner(), Self::statement),
            other => self.inner(other),
        }
    }

    fn expr(&mut self, node: Node<Expr>) {
        self.inner(node.into_inner());
    }

    fn inner(&mut self, expr: Expr) {
        match expr {
            Expr::Literal(_) | Expr::Variable(_) | Expr::Break(_) => {}
            Expr::Container(node) => self.container(node.into_inner()),
            Expr::IfStatement(node) => self.condition(node.into_inner(), Self::expr),
            Expr::Op(node) => {
                let op = node.into_inner();
                self.expr(*op.0);
                self.expr(*op.2);
            }
            Expr::Assignment(node) => self.assignment(node.into_inner()),
            Expr::Query(node) => {
                let span = node.span();
                self.query(node.into_inner(), span);
            }
            Expr::FunctionCall(node) => self.call(node.into_inner()),
            Expr::Unary(node) => match node.into_inner() {
                Unary::Not(not) => self.expr(*not.into_inner().take().1),
            },
            Expr::Abort(node) => {
                if let Some(message) = node.into_inner().message {
                    self.expr(*message);
                }
            }
            Expr::Return(node) => self.expr(*node.into_inner().expr),
        }
    }

    fn condition(&mut self, statement: IfStatement, branch: fn(&mut Self, Node<Expr>)) {
        match statement.predicate.into_inner() {
            Predicate::One(node) => self.expr(*node),
            Predicate::Many(nodes) => nodes.into_iter().for_each(|node| self.expr(node)),
        }
        for block in [Some(statement.if_node), statement.else_node].into_iter().flatten() {
            block.into_inner().into_iter().for_each(|node| branch(self, node));
        }
    }

    fn block(&mut self, block: Block) {
        block.into_iter().for_each(|node| self.expr(node));
    }

    fn container(&mut self, container: Container) {
        match container {
            Container::Group(node) => self.expr((*node).into_inner().into_inner()),
            Container::Block(node) => self.block(node.into_inner()),
            Container::Array(node) => node.into_inner().into_iter().for_each(|node| self.expr(node)),
            Container::Object(node) => node.into_inner().into_iter().for_each(|(_, node)| self.expr(node)),
        }
    }

    fn assignment(&mut self, assignment: Assignment) {
        let (targets, op, expr) = match assignment {
            Assignment::Single { target, op, expr } => (vec![target], op, expr),
            Assignment::Infallible { ok, err, op, expr } => (vec![ok, err], op, expr),
        };
        for target in targets {
            let span = target.span().range();
            let path = match target.into_inner() {
                AssignmentTarget::Noop | AssignmentTarget::Internal(..) => continue,
                AssignmentTarget::External(path) => path.unwrap_or_else(OwnedTargetPath::event_root),
                AssignmentTarget::Query(query) => match query.target.inner() {
                    QueryTarget::External(prefix) => OwnedTargetPath { prefix: *prefix, path: query.path.into_inner() },
                    _ => continue,
                },
            };
            if op == vrl::parser::ast::AssignmentOp::Merge {
                self.reads.push((path.clone(), span.clone()));
            }
            self.writes.push((path, span));
        }
        self.expr(*expr);
    }

    fn query(&mut self, query: Query, span: Span) {
        let path: OwnedValuePath = query.path.into_inner();
        match query.target.into_inner() {
            QueryTarget::Internal(_) => {}
            QueryTarget::External(prefix) => self.reads.push((OwnedTargetPath { prefix, path }, span.range())),
            QueryTarget::FunctionCall(call) => self.call(call),
            QueryTarget::Container(container) => self.container(container),
        }
    }

    fn call(&mut self, call: FunctionCall) {
        if is_del(&call)
            && let Some(written) = call.arguments.first().and_then(|a| external_query(&a.inner().expr))
        {
            self.writes.push(written);
        }
        self.functions.push((call.ident.to_string(), call.ident.span().range()));
        for argument in call.arguments {
            self.expr(argument.into_inner().expr);
        }
        if let Some(closure) = call.closure {
            self.block(closure.into_inner().block.into_inner());
        }
    }
}

fn is_del(call: &FunctionCall) -> bool {
    &**call.ident.inner() == "del"
}

/// `del(.name)` of a whole member, without options.
fn is_plain_del(call: &Node<FunctionCall>) -> bool {
    let call = call.inner();
    let whole_member =
        |(path, _): &Placed<OwnedTargetPath>| path.path.segments.len() == 1 && path.path.segments[0].is_field();
    is_del(call)
        && call.arguments.len() == 1
        && call
            .arguments
            .first()
            .and_then(|a| external_query(&a.inner().expr))
            .is_some_and(|query| whole_member(&query))
}
