//! Two committers with the same transactional ids, on a modelled broker: who initialises an id last owns it, and the calls
//! of the other on it are fenced.

use super::random::Random;
use crate::commit::Epoch;
use crate::commit::protocol::{Await, Effect, Event, Protocol, Work};
use crate::error::{Disposition, Exit};

/// The longest that initialising an id takes.
const INIT_MS: u64 = 1_500;

struct Twin {
    protocol: Protocol,
    effect: Effect,
    epoch: Epoch,
    /// The open batch has outputs: it is sealed next.
    full: bool,
    /// When each of the ids is initialised, while that goes on.
    inits: [Option<u64>; 2],
    /// When the effect under way is done.
    at: u64,
    ended: Option<Exit>,
}

impl Twin {
    /// A process that starts then: it initialises both ids before it works.
    fn start(at: u64, random: &mut Random) -> Twin {
        let protocol = Protocol::new(10_000);
        let effect = protocol.start();
        let mut twin = Twin { protocol, effect, epoch: Epoch(0), full: false, inits: [None; 2], at, ended: None };
        twin.initialise(at, random);
        twin
    }

    fn initialise(&mut self, now: u64, random: &mut Random) {
        self.inits = [(); 2].map(|()| Some(now + 1 + random.below(INIT_MS)));
        self.at = self.inits.into_iter().flatten().max().unwrap();
    }

    fn next_at(&self) -> u64 {
        let init = self.inits.into_iter().flatten().min();
        if self.ended.is_some() { u64::MAX } else { init.unwrap_or(self.at).min(self.at) }
    }

    /// Goes on to its next moment.
    fn step(&mut self, me: usize, owners: &mut [usize; 2], random: &mut Random) {
        let now = self.next_at();
        for (init, owner) in self.inits.iter_mut().zip(owners.iter_mut()) {
            if *init == Some(now) {
                (*init, *owner) = (None, me);
            }
        }
        if self.at != now {
            return;
        }
        let owns = |side: usize| if owners[side] == me { Event::Done } else { Event::Failed(Disposition::Fenced) };
        let event = match self.effect {
            Effect::Receive => {
                self.full = !self.full;
                let epoch = self.epoch;
                Event::Received(if self.full { Work::Outputs { epoch } } else { Work::Seal { epoch } })
            }
            Effect::Produce(side)
            | Effect::Flush(side)
            | Effect::SendOffsets(side)
            | Effect::Commit(side)
            | Effect::Abort(side) => owns(side.index()),
            Effect::Rebuild { first: Await::Until(ms) } if now < ms => Event::Failed(Disposition::Retry),
            Effect::Report { epoch, .. } => {
                (self.epoch, self.full) = (epoch.next(), false);
                Event::Done
            }
            _ => Event::Done,
        };
        self.effect = self.protocol.on(event, now);
        self.at = now + 1 + random.below(20);
        match self.effect {
            Effect::Rebuild { first: Await::Until(ms) } if now < ms => self.at = ms,
            Effect::Rebuild { .. } => self.initialise(now, random),
            Effect::Stop(exit) => self.ended = Some(exit),
            _ => {}
        }
    }
}

#[test]
fn of_twins_that_take_their_ids_in_any_order_the_newcomer_alone_stays() {
    for seed in 0..5_000 {
        let mut random = Random(seed);
        let mut owners = [0; 2];
        let mut twins = [Twin::start(0, &mut random), Twin::start(INIT_MS + random.below(500), &mut random)];
        loop {
            let [old, newcomer] = &twins;
            let next = usize::from(newcomer.next_at() < old.next_at());
            if twins[next].next_at() > 60_000 {
                break;
            }
            twins[next].step(next, &mut owners, &mut random);
        }
        assert_eq!(twins.map(|twin| twin.ended), [Some(Exit::Twin), None], "seed {seed}");
    }
}
