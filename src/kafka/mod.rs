//! The only module that speaks to librdkafka. It keeps what the client hides: rebalances as events in the worker's own
//! loop, group metadata that can be looked at, topic ids, positions without an opinion on where to start.
//!
//! Everything here blocks and belongs on an operating-system thread, never on an async runtime. It calls librdkafka's
//! C interface directly where `rdkafka`'s own types are in the way: there `commit_transaction` costs 100 ms whenever a
//! message is unacknowledged, `abort_transaction` can hang, closing a consumer has no bound, and rebalances arrive in a
//! callback.

mod admin;
mod advice;
mod caller;
mod client;
mod code;
mod config;
mod consumer;
mod describe;
mod error;
mod group;
mod groups;
mod list;
mod logs;
mod message;
mod offsets;
mod options;
mod producer;
mod reader;
mod request;
mod round;
mod topics;

#[cfg(test)]
mod mock_tests;

pub use admin::Admin;
pub use client::version as client_version;
pub use code::Code;
pub use config::Connection;
pub use consumer::{Consumer, Polled};
pub use describe::TopicInfo;
pub use error::{Error, Operation};
pub use group::{GroupHandle, GroupMetadata};
pub use groups::{Group, Member};
pub use message::Message;
pub use offsets::{At, Committed, CommittedWith, Isolation};
pub use options::{ConsumerOptions, LINGER, ProducerOptions};
pub use producer::Producer;
pub use reader::{Range, Reader};
pub use round::Round;
