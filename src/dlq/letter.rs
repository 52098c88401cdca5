//! One dead letter.

use std::fmt;
use std::str::FromStr;

use crate::ids;
use crate::record::{Input, Offset, Timestamp};
use crate::reject::{CUT, header};

/// Where a dead letter lies in its topic: `PARTITION:OFFSET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    pub partition: i32,
    pub offset: Offset,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.partition, self.offset)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let parsed = text.split_once(':').and_then(|(partition, offset)| {
            let (partition, offset) = (partition.parse().ok()?, offset.parse().ok()?);
            (partition >= 0 && offset >= 0).then_some(Address { partition, offset: Offset(offset) })
        });
        parsed.ok_or_else(|| format!("`{text}` is no address of a dead letter: write PARTITION:OFFSET, such as 0:17"))
    }
}

/// A dead letter: the record as it was rejected, and what was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub address: Address,
    /// The record's own.
    pub timestamp: Timestamp,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    /// The record's headers in order, then the dead letter's own.
    pub headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Letter {
    pub fn new(input: &Input<'_>) -> Letter {
        let owned = |bytes: Option<&[u8]>| bytes.map(<[u8]>::to_vec);
        Letter {
            address: Address { partition: input.partition, offset: input.offset },
            timestamp: input.timestamp,
            key: owned(input.key),
            value: owned(input.value),
            headers: input.headers.0.iter().map(|(name, value)| (name.to_vec(), owned(*value))).collect(),
        }
    }

    /// The last header of that name as text; empty where there is none.
    fn text(&self, name: &str) -> &str {
        let found = self.headers.iter().rev().find(|(n, _)| n == name.as_bytes());
        found.and_then(|(_, value)| std::str::from_utf8(value.as_deref()?).ok()).unwrap_or_default()
    }

    /// The node that rejected it.
    pub fn node(&self) -> &str {
        self.text(header::NODE)
    }

    pub fn reason(&self) -> &str {
        self.text(header::REASON)
    }

    pub fn message(&self) -> &str {
        self.text(header::MESSAGE)
    }

    /// Topic, partition and offset of the record, as text.
    pub fn source(&self) -> (&str, &str, &str) {
        (self.text(header::TOPIC), self.text(header::PARTITION), self.text(header::OFFSET))
    }

    /// How often the record was rejected, from 1; 0 where the letter does not say.
    pub fn attempt(&self) -> u32 {
        self.text(header::ATTEMPT).parse().unwrap_or(0)
    }

    pub fn event_id(&self) -> Option<&str> {
        Some(self.text(ids::HEADER)).filter(|id| !id.is_empty())
    }

    /// The record was too large for the dead-letter topic: it is not whole.
    pub fn is_cut(&self) -> bool {
        self.message().ends_with(CUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_partition_and_an_offset() {
        let address: Address = "3:17".parse().unwrap();
        assert_eq!(address, Address { partition: 3, offset: Offset(17) });
        assert_eq!(address.to_string(), "3:17");
        for bad in ["", "3", "3:", ":3", "a:1", "-1:3", "1:-3", "1:2:3"] {
            assert!(bad.parse::<Address>().unwrap_err().contains("PARTITION:OFFSET"), "{bad}");
        }
    }
}
