use super::{preflight::StageTopics, task::Task};
use crate::{
    chunk::Chunk,
    error::Failure,
    observe::status::StageStatus,
    record::Input,
    topology::{plan::*, spec::*},
};
use std::sync::Arc;
pub struct PostgresTask;
pub struct Checked;
impl PostgresTask {
    pub fn preflight(_: &Topology, _: NodeId) -> Result<Checked, Failure> {
        Ok(Checked)
    }
    pub fn new(
        _: &Plan,
        _: NodeId,
        _: &Stage,
        _: &StageTopics,
        _: &Checked,
        _: Arc<StageStatus>,
    ) -> Result<PostgresTask, Failure> {
        Ok(PostgresTask)
    }
}
impl Task for PostgresTask {
    fn process(&mut self, _: &Input<'_>, _: &mut Chunk) -> Result<(), Failure> {
        Ok(())
    }
    fn reject(&mut self, _: &Input<'_>, _: &'static str, _: &mut Chunk) -> Result<(), Failure> {
        Ok(())
    }
}
