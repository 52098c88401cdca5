//! What an error of the database asks for, by its SQLSTATE.

use std::io;

use tokio_postgres::error::DbError;

use crate::error::{Disposition, Exit};

/// An error of a statement, a COMMIT or a connection.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The server answered with an error: the transaction is gone, its effects with it.
    #[error("{}", .0.message)]
    Server(Box<ServerError>),
    /// No answer, or none that counts. After COMMIT was sent the outcome is unknown.
    #[error("{0}")]
    Connection(String),
    /// The driver could not send what we gave it.
    #[error("{0}")]
    Client(String),
}

/// What the server said.
#[derive(Clone, Debug)]
pub struct ServerError {
    pub class: Class,
    /// SQLSTATE and the server's words: `23514 new row for relation "t" violates check constraint "c"`.
    pub message: String,
}

/// Classes of SQLSTATEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Passes by itself: do the whole transaction again.
    Transient,
    /// A statement ran into its time limit, or the server out of memory: again, then in smaller parts.
    TooMuch,
    /// A standby: look for the primary.
    WrongServer,
    /// A row that cannot be stored.
    Poison,
    /// A row that other rows stand in the way of (unique, foreign key, exclusion): it may fit once they are written.
    Conflict,
    /// Two rows of one statement were equal in the database: send them apart.
    Repeated,
    /// The table, the connection's rights or the statement: no record is to blame.
    Configuration,
}

impl Class {
    /// By SQLSTATE; a check violation without a constraint's name is a missing partition.
    pub fn of(sqlstate: &str, constraint: Option<&str>) -> Class {
        match sqlstate {
            "40001" | "40P01" | "55P03" | "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => Class::Transient,
            "57014" | "53200" => Class::TooMuch,
            "25006" => Class::WrongServer,
            // P0001: a trigger of the user's said no to a row.
            "23502" | "54000" | "54001" | "P0001" => Class::Poison,
            "23001" | "23503" | "23505" | "23P01" => Class::Conflict,
            "23514" if constraint.is_some_and(|c| !c.is_empty()) => Class::Poison,
            "21000" => Class::Repeated,
            _ => match sqlstate.get(..2) {
                Some("08" | "53" | "58") => Class::Transient,
                Some("22") => Class::Poison,
                _ => Class::Configuration,
            },
        }
    }
}

impl Error {
    /// From the driver. `closed` says whether the connection is gone: the driver does not say it of every error.
    pub fn new(error: &tokio_postgres::Error, closed: bool) -> Error {
        if let Some(db) = error.as_db_error() {
            return Error::Server(Box::new(ServerError::new(db)));
        }
        let message = with_causes(error);
        if closed || error.is_closed() { Error::Connection(message) } else { Error::Client(message) }
    }

    /// The same error with where it happened put in front.
    pub fn context(self, place: &str) -> Error {
        match self {
            Error::Server(mut e) => {
                e.message = format!("{place}: {}", e.message);
                Error::Server(e)
            }
            Error::Connection(message) => Error::Connection(format!("{place}: {message}")),
            Error::Client(message) => Error::Client(format!("{place}: {message}")),
        }
    }

    pub fn class(&self) -> Option<Class> {
        match self {
            Error::Server(e) => Some(e.class),
            Error::Connection(_) | Error::Client(_) => None,
        }
    }

    /// From opening a connection: what the network did passes, what the server or the driver says of our settings does
    /// not.
    pub fn connecting(error: &tokio_postgres::Error) -> Error {
        if let Some(db) = error.as_db_error() {
            return Error::Server(Box::new(ServerError::new(db)));
        }
        let message = with_causes(error);
        let io = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
        match io.map(io::Error::kind) {
            // A certificate that is not trusted, a host name that is none.
            Some(io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput) => Error::Client(message),
            Some(_) => Error::Connection(message),
            None if error.is_closed() => Error::Connection(message),
            None => Error::Client(message),
        }
    }

    /// Whether a part of the rows may do better than all of them.
    pub fn asks_for_parts(&self) -> bool {
        matches!(self.class(), Some(Class::Poison | Class::Conflict | Class::Repeated))
    }

    /// What the worker does about it.
    pub fn disposition(&self) -> Disposition {
        match self {
            Error::Connection(_) => Disposition::Rebuild,
            Error::Client(_) => Disposition::Fatal(Exit::Stopped),
            Error::Server(e) => match e.class {
                Class::Transient | Class::TooMuch => Disposition::Retry,
                Class::WrongServer => Disposition::Rebuild,
                Class::Poison | Class::Conflict => Disposition::Reject { reason: "database" },
                Class::Repeated | Class::Configuration => Disposition::Fatal(Exit::Stopped),
            },
        }
    }
}

impl ServerError {
    fn new(error: &DbError) -> ServerError {
        let sqlstate = error.code().code().to_owned();
        let class = Class::of(&sqlstate, error.constraint());
        let mut message = format!("{sqlstate} {}", error.message());
        // For these the detail names the other row; elsewhere it repeats the record.
        if let (Class::Conflict, Some(detail)) = (class, error.detail()) {
            message.push_str(&format!(" ({})", detail.chars().take(200).collect::<String>().trim_end_matches('.')));
        }
        if matches!(sqlstate.as_str(), "26000" | "42P05") {
            message.push_str(" (behind a pooler in transaction mode set prepared = false in the sink)");
        }
        if let (Class::Configuration, Some(hint)) = (class, error.hint()) {
            message.push_str(&format!(" ({hint})"));
        }
        ServerError { class, message }
    }
}

/// An error with its causes: the driver's own words are only "error connecting to server".
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(&format!(": {text}"));
        }
        cause = error.source();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstates_fall_into_the_class_that_loses_nothing() {
        for (code, class) in [
            ("40001", Class::Transient),
            ("40P01", Class::Transient),
            ("55P03", Class::Transient),
            ("53300", Class::Transient),
            ("08006", Class::Transient),
            ("57P01", Class::Transient),
            ("57014", Class::TooMuch),
            ("53200", Class::TooMuch),
            ("25006", Class::WrongServer),
            ("22001", Class::Poison),
            ("22P05", Class::Poison),
            ("23502", Class::Poison),
            ("54001", Class::Poison),
            ("P0001", Class::Poison),
            ("23503", Class::Conflict),
            ("23505", Class::Conflict),
            ("21000", Class::Repeated),
            ("42P01", Class::Configuration),
            ("42703", Class::Configuration),
            ("42501", Class::Configuration),
            ("28P01", Class::Configuration),
            ("3D000", Class::Configuration),
            ("0A000", Class::Configuration),
            ("25P02", Class::Configuration),
            ("XX000", Class::Configuration),
            ("", Class::Configuration),
        ] {
            assert_eq!(Class::of(code, None), class, "{code}");
        }
    }

    #[test]
    fn a_missing_partition_is_no_fault_of_the_record() {
        assert_eq!(Class::of("23514", Some("amount_is_positive")), Class::Poison);
        assert_eq!(Class::of("23514", Some("")), Class::Configuration);
        assert_eq!(Class::of("23514", None), Class::Configuration);
    }
}
