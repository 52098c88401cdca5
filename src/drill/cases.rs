//! Which crashes a drill makes: of each stage at each place, then at random moments.

use std::time::Duration;

use crate::crash::{Crash, Point};
use crate::quickstart::orders::Random;
use crate::scratch::input::PARTITIONS;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{NodeKind, Stores};

/// The commit takes milliseconds; a kill that late falls into it.
const IN_FLIGHT_WITHIN: u64 = 3_000;
/// A random moment is so long after a random record: what follows it takes about that long.
const MOMENT_WITHIN: u64 = 10_000;

/// One crash of one stage, or of the whole job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub kill: Kill,
    /// None: the whole job.
    pub stage: Option<String>,
}

/// How a process is made to crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    At(Point),
    /// After the commit was sent and before its answer, tried until it is met so often.
    InFlight {
        wanted: u32,
    },
    Moment,
}

impl Case {
    /// As reports call it.
    pub fn name(&self) -> String {
        match self.kill {
            Kill::At(point) => point.to_string(),
            Kill::InFlight { .. } => "commit-in-flight".to_owned(),
            Kill::Moment => "random-moment".to_owned(),
        }
    }
}

/// What the crash-free run tells of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    pub records: u64,
    pub transactions: u64,
}

/// All crashes of a drill.
pub fn cases(plan: &Plan, random: usize, quick: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for stage in &plan.stages {
        let name = Some(stage.name.clone());
        let points = points(plan, stage).into_iter().filter(|point| !quick || is_quick(*point));
        cases.extend(points.map(|point| Case { kill: Kill::At(point), stage: name.clone() }));
        let wanted = if quick { 1 } else { 2 };
        let flight = Case { kill: Kill::InFlight { wanted }, stage: name };
        let after = cases.iter().rposition(|case| case.kill == Kill::At(Point::AfterCommit)).unwrap_or(cases.len());
        cases.insert(after, flight);
    }
    let moment = || Case { kill: Kill::Moment, stage: None };
    cases.extend(std::iter::repeat_with(moment).take(random));
    cases
}

/// The places that a stage comes by, in the order in which a batch does.
fn points(plan: &Plan, stage: &Stage) -> Vec<Point> {
    let kafka = matches!(stage.kind, StageKind::Kafka { .. });
    let state = !plan.stores(stage).is_empty();
    let disk = state && plan.topology.stores == Stores::Disk;
    let passes = |point: &Point| match point {
        Point::BeforeSendOffsets | Point::AfterSendOffsets => plan.transactional(),
        Point::BeforeDatabaseCommit | Point::AfterDatabaseCommit | Point::BeforePositions => !kafka,
        Point::BeforeApply | Point::AfterApply | Point::InRestore => state,
        Point::BeforeCheckpoint => disk,
        // What a Postgres stage produces are dead letters, if there are any.
        Point::AfterProduce => kafka,
        // A second process is given something only where a member of the first one has two partitions.
        Point::InRevoke => partitions(plan, stage) > plan.topology.workers as usize,
        _ => true,
    };
    crate::crash::POINTS.into_iter().filter(passes).collect()
}

/// Partitions of the topics that a stage reads in a drill.
fn partitions(plan: &Plan, stage: &Stage) -> usize {
    let written = |topic: &String| {
        plan.topology.nodes.iter().find_map(|node| match &node.kind {
            NodeKind::KafkaSink(sink) if sink.topic == *topic => sink.create.as_ref().map(|create| create.partitions),
            _ => None,
        })
    };
    plan.reads(stage).iter().map(|topic| written(topic).unwrap_or(PARTITIONS) as usize).sum()
}

/// Where each guarantee has something to lose.
fn is_quick(point: Point) -> bool {
    matches!(
        point,
        Point::AfterProduce
            | Point::AfterSendOffsets
            | Point::BeforeCommit
            | Point::AfterCommit
            | Point::AfterDatabaseCommit
    )
}

/// When to crash: somewhere in the middle, where a batch is committed and another is not. `tried`: how often before.
pub fn crash(kill: Kill, load: &Load, tried: usize, random: &mut Random) -> Crash {
    let batches = load.transactions.clamp(1, 5);
    let batch = if batches < 3 { batches } else { 2 + random.below(batches - 2) };
    let record = (load.records / 3 + random.below(load.records / 3 + 1)).max(1);
    match kill {
        Kill::At(point) => {
            let nth = match point {
                Point::AtStart | Point::InRevoke | Point::InRestore | Point::BeforeCheckpoint => 1,
                Point::AfterPoll | Point::AfterProcess => record,
                _ => batch,
            };
            Crash::at(point, nth)
        }
        Kill::InFlight { .. } => {
            // Where the machine is busy the kill comes later than it is meant to.
            let within = IN_FLIGHT_WITHIN >> (tried / 2).min(5);
            let after = Duration::from_micros(50 + random.below(within - 50));
            Crash { after, ..Crash::at(Point::BeforeCommit, batch) }
        }
        Kill::Moment => {
            let nth = 1 + random.below((load.records * 9 / 10).max(1));
            Crash { after: Duration::from_micros(random.below(MOMENT_WITHIN)), ..Crash::at(Point::AfterPoll, nth) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::topology::load;

    #[test]
    fn partitions_are_asked_back_only_where_a_member_has_two() {
        let file = |workers: u32, partitions: i32| {
            format!(
                r#"
name = "t"
workers = {workers}
kafka.brokers = "localhost:9092"
[sources.in]
type = "kafka"
topics = ["in"]
[sinks.out]
type = "kafka"
inputs = ["in"]
topic = "out"
create = {{ partitions = {partitions} }}
[sinks.rows]
type = "postgres"
inputs = ["out"]
url = "postgres://localhost/x"
table = "rows"
key = ["id"]
version = "version"
"#
            )
        };
        let revoked = |workers, partitions| -> Vec<String> {
            let loaded = load(&file(workers, partitions), "t.toml", &|_| None);
            let topology = loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings));
            let cases = cases(&Plan::new(Arc::new(topology)), 0, false).into_iter();
            cases.filter(|case| case.kill == Kill::At(Point::InRevoke)).filter_map(|case| case.stage).collect()
        };
        assert_eq!(revoked(1, 2), ["t", "rows"]);
        assert_eq!(revoked(1, 1), ["t"]);
        assert_eq!(revoked(2, 4), ["rows"]);
    }
}
