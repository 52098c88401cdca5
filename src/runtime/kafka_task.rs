//! The Kafka stage's task: the topology's operators.

use std::collections::HashMap;
use std::sync::Arc;

use crate::chunk::Chunk;
use crate::error::Failure;
use crate::observe::status::StageStatus;
use crate::operator::{Outcome, Pipeline};
use crate::record::Input;
use crate::reject::Reject;
use crate::runtime::task::Task;
use crate::topology::spec::NodeId;

/// Runs records through a pipeline and counts what became of them.
pub struct KafkaTask {
    pub pipeline: Pipeline,
    /// Which source reads a topic.
    pub sources: HashMap<String, NodeId>,
    pub status: Arc<StageStatus>,
}

impl KafkaTask {
    fn source(&self, topic: &str) -> NodeId {
        *self.sources.get(topic).expect("only topics of sources are subscribed to")
    }
}

impl Task for KafkaTask {
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure> {
        let source = self.source(input.topic);
        match self.pipeline.process(source, input, chunk) {
            Ok(Outcome::Processed { outputs: 0 }) => self.status.dropped.add(1),
            Ok(Outcome::Processed { .. }) => {}
            Ok(Outcome::Rejected { node, reason }) => self.status.reject(&node, reason),
            Ok(Outcome::Skipped) => self.status.skipped.add(1),
            Err(stop) => {
                return Err(Failure::stopped(format!(
                    "{}-{} offset {}: {} ({}): {}; on_error = \"stop\"",
                    input.topic, input.partition, input.offset, stop.node, stop.reason, stop.message
                )));
            }
        }
        Ok(())
    }

    fn reject(&mut self, input: &Input<'_>, reason: &'static str, chunk: &mut Chunk) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let reject = Reject {
            node: self.pipeline.node_name(source).to_owned(),
            reason: "broker",
            message: format!("the broker refused an output of this record: {reason}"),
        };
        self.pipeline.reject(source, input, &reject, chunk);
        self.status.reject(&reject.node, reject.reason);
        Ok(())
    }
}
