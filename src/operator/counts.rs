//! What happened to records, by node.

use std::collections::BTreeMap;

use crate::topology::spec::NodeId;

/// Counters of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Records that came in.
    pub input: u64,
    /// Records that went on, to a consumer or into a topic: one for each record, whoever takes it.
    pub output: u64,
    /// Records that a filter, an `abort`, a route without a taker or `tombstones = "drop"` ended.
    pub dropped: u64,
    /// Records whose window had closed.
    pub late: u64,
    /// Records that failed here under `on_error = "skip"`.
    pub skipped: u64,
}

/// Counters of a pipeline since it was made. Of a record that was withdrawn only its failure counts.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    nodes: Vec<NodeCounts>,
    /// Of the record that is on its way.
    open: Vec<NodeCounts>,
    rejects: BTreeMap<(NodeId, &'static str), u64>,
}

impl Counts {
    pub(super) fn new(nodes: usize) -> Counts {
        Counts {
            nodes: vec![NodeCounts::default(); nodes],
            open: vec![NodeCounts::default(); nodes],
            rejects: BTreeMap::new(),
        }
    }

    /// The counters of a node; zeros for one of another stage.
    pub fn node(&self, node: NodeId) -> NodeCounts {
        self.nodes.get(node.0).copied().unwrap_or_default()
    }

    /// Records whose window had closed, of all nodes.
    pub fn late(&self) -> u64 {
        self.nodes.iter().map(|node| node.late).sum()
    }

    /// Rejects by node and reason.
    pub fn rejects(&self) -> impl Iterator<Item = (NodeId, &'static str, u64)> + '_ {
        self.rejects.iter().map(|((node, reason), count)| (*node, *reason, *count))
    }

    pub(super) fn open(&mut self, node: NodeId) -> &mut NodeCounts {
        &mut self.open[node.0]
    }

    /// The record went through.
    pub(super) fn keep(&mut self) {
        for (total, open) in self.nodes.iter_mut().zip(&mut self.open) {
            let open = std::mem::take(open);
            total.input += open.input;
            total.output += open.output;
            total.dropped += open.dropped;
            total.late += open.late;
        }
    }

    fn withdraw(&mut self) {
        self.open.fill(NodeCounts::default());
    }

    pub(super) fn rejected(&mut self, node: NodeId, reason: &'static str) {
        self.withdraw();
        *self.rejects.entry((node, reason)).or_default() += 1;
    }

    pub(super) fn skipped(&mut self, node: NodeId) {
        self.withdraw();
        self.nodes[node.0].skipped += 1;
    }

    pub(super) fn stopped(&mut self) {
        self.withdraw();
    }
}
