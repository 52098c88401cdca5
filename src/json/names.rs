//! Names of members, and whether one stands twice in its object.

use std::borrow::Cow;
use std::ops::Range;

use super::{JsonError, lossy, unescape};

/// A member's name: its place in the text (without the quotes) and what makes comparing cheap.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub(super) span: Range<u32>,
    /// The first eight bytes of the unescaped name, mixed with its length: names that differ here differ.
    pub(super) signature: u64,
    pub(super) escaped: bool,
}

/// Names of one object that are compared as they come; more of them are sorted once the object ends, so that an object of
/// a million members does not cost a million squared.
pub(super) const COMPARED: usize = 32;

impl Name {
    #[inline]
    pub(super) fn new(text: &[u8], span: Range<u32>, escaped: bool) -> Name {
        let signature = if escaped {
            signature(unescape(&text[range(&span)]).as_bytes())
        } else {
            signature_at(text, span.start as usize, span.len())
        };
        Name { span, signature, escaped }
    }

    /// The name as a program knows it.
    pub(super) fn unescaped<'a>(&self, text: &'a [u8]) -> Cow<'a, str> {
        let raw = &text[range(&self.span)];
        if self.escaped { Cow::Owned(unescape(raw)) } else { lossy(raw) }
    }

    #[inline]
    pub(super) fn is(&self, text: &[u8], name: &str, signature: u64) -> bool {
        self.signature == signature && self.reads(text, name)
    }

    fn reads(&self, text: &[u8], name: &str) -> bool {
        let raw = &text[range(&self.span)];
        if self.escaped { unescape(raw) == name } else { raw == name.as_bytes() }
    }

    pub(super) fn same(&self, other: &Name, text: &[u8]) -> bool {
        self.signature == other.signature && self.unescaped(text) == other.unescaped(text)
    }
}

pub(super) fn range(span: &Range<u32>) -> Range<usize> {
    span.start as usize..span.end as usize
}

/// See [`Name::signature`].
pub(super) fn signature(name: &[u8]) -> u64 {
    let mut word = [0; 8];
    let head = name.len().min(8);
    word[..head].copy_from_slice(&name[..head]);
    u64::from_le_bytes(word) ^ mixed(name.len())
}

fn signature_at(text: &[u8], start: usize, len: usize) -> u64 {
    match text.get(start..start + 8) {
        Some(word) => {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            let word = if len < 8 { word & ((1 << (8 * len)) - 1) } else { word };
            word ^ mixed(len)
        }
        None => signature(&text[start..start + len]),
    }
}

fn mixed(len: usize) -> u64 {
    (len as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A sieve over the names of one object: it says at once of most names that they are new.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sieve(u64);

impl Sieve {
    /// Whether the name may have been there before.
    #[inline]
    pub(super) fn knows(&mut self, name: &Name) -> bool {
        let bit = 1 << (name.signature.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58);
        let known = self.0 & bit != 0;
        self.0 |= bit;
        known
    }
}

/// The names of the inner objects that are open. Scratch space, kept from record to record.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    names: Vec<Name>,
    /// Where the names of each object begin.
    objects: Vec<(usize, Sieve)>,
}

impl Names {
    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.objects.clear();
    }

    pub(super) fn open(&mut self) {
        self.objects.push((self.names.len(), Sieve::default()));
    }

    /// Adds a name of the innermost object.
    pub(super) fn add(&mut self, name: Name, text: &[u8]) -> Result<(), JsonError> {
        let Some((start, sieve)) = self.objects.last_mut() else { return Ok(()) };
        if sieve.knows(&name) {
            differs(&name, self.names[*start..].iter(), text)?;
        }
        self.names.push(name);
        Ok(())
    }

    pub(super) fn close(&mut self, text: &[u8]) -> Result<(), JsonError> {
        let Some((start, _)) = self.objects.pop() else { return Ok(()) };
        all_differ(&mut self.names[start..], text)?;
        self.names.truncate(start);
        Ok(())
    }
}

/// Compares a name with those before it, while they are few; [`all_differ`] looks at the many.
pub(super) fn differs<'a>(
    name: &Name,
    mut earlier: impl ExactSizeIterator<Item = &'a Name>,
    text: &[u8],
) -> Result<(), JsonError> {
    if earlier.len() < COMPARED && earlier.any(|other| other.same(name, text)) {
        return Err(duplicate(name, text));
    }
    Ok(())
}

/// Looks for a duplicate among the names of a large object.
pub(super) fn all_differ(names: &mut [Name], text: &[u8]) -> Result<(), JsonError> {
    if names.len() <= COMPARED {
        return Ok(());
    }
    names.sort_unstable_by(|a, b| {
        let by_text = || a.unescaped(text).cmp(&b.unescaped(text));
        a.signature.cmp(&b.signature).then_with(by_text).then(a.span.start.cmp(&b.span.start))
    });
    match names.windows(2).find(|pair| pair[0].same(&pair[1], text)) {
        Some(pair) => Err(duplicate(&pair[1], text)),
        None => Ok(()),
    }
}

fn duplicate(name: &Name, text: &[u8]) -> JsonError {
    JsonError {
        offset: name.span.start as usize - 1,
        message: format!("the member {:?} stands twice in its object", name.unescaped(text)).into(),
    }
}
