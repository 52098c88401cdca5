//! stub: pass-through
pub mod row;
use crate::chunk::*;
use crate::error::Failure;
use crate::record::*;
use crate::reject::*;
use crate::topology::plan::*;
use crate::topology::spec::*;
use std::collections::HashMap;
use uuid::Uuid;
pub struct Environment {
    pub targets: Vec<Target>,
    pub topic_ids: HashMap<String, Uuid>,
    pub dead_letters: TargetId,
}
pub struct Pipeline(Environment);
pub enum Outcome {
    Processed { outputs: u32 },
    Rejected { node: String, reason: &'static str },
    Skipped,
}
pub struct Stop {
    pub node: String,
    pub reason: &'static str,
    pub message: String,
}
impl Pipeline {
    pub fn new(_: &Plan, e: Environment) -> Result<Pipeline, Failure> {
        Ok(Pipeline(e))
    }
    pub fn process(&mut self, _: NodeId, i: &Input<'_>, c: &mut Chunk) -> Result<Outcome, Stop> {
        let mut o = c.push(TargetId(0));
        o.partition(i.partition % self.0.targets[0].partitions).key(i.key).value(i.value).timestamp(i.timestamp);
        o.finish();
        Ok(Outcome::Processed { outputs: 1 })
    }
    pub fn node_name(&self, _: NodeId) -> &str {
        ""
    }
    pub fn reject(&mut self, _: NodeId, _: &Input<'_>, _: &Reject, _: &mut Chunk) {}
}
