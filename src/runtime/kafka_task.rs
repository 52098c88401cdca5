//! The Kafka stage's task: the topology's operators.

use std::collections::HashMap;
use std::sync::Arc;

use crate::chunk::Chunk;
use crate::error::Failure;
use crate::observe::status::StageStatus;
use crate::operator::{Outcome, Pipeline, Stop};
use crate::record::Input;
use crate::reject::Reject;
use crate::runtime::task::Task;
use crate::topology::spec::NodeId;

/// Runs records through a pipeline and counts what became of them.
pub struct KafkaTask {
    pub pipeline: Pipeline,
    /// Which source reads a topic.
    pub sources: HashMap<String, NodeId>,
    /// Names of the nodes by id, for the counters.
    pub names: Vec<String>,
    pub status: Arc<StageStatus>,
}

impl KafkaTask {
    /// The source that reads a topic; some source for a record of which that is not known.
    fn source(&self, topic: &str) -> NodeId {
        *self.sources.get(topic).or_else(|| self.sources.values().min()).expect("a stage has sources")
    }

    fn count(&self, outcome: Result<Outcome, Stop>) -> Result<(), Failure> {
        match outcome {
            Ok(Outcome::Processed { outputs: 0 }) => self.status.dropped.add(1),
            Ok(Outcome::Processed { outputs }) => self.status.records_out.add(u64::from(outputs)),
            Ok(Outcome::Rejected { node, reason }) => self.status.reject(&self.names[node.0], reason),
            Ok(Outcome::Skipped { .. }) => self.status.skipped.add(1),
            Err(stop) => return Err(Failure::stopped(stop.to_string())),
        }
        Ok(())
    }
}

impl Task for KafkaTask {
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let outcome = self.pipeline.process(source, input, chunk);
        self.count(outcome)
    }

    fn reject(
        &mut self,
        input: &Input<'_>,
        reason: &'static str,
        message: String,
        chunk: &mut Chunk,
    ) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let reject = Reject { node: self.names[source.0].clone(), reason, message };
        let outcome = self.pipeline.reject(source, input, reject, chunk);
        self.count(outcome)
    }
}
